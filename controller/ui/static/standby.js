// Reloads the standby page as soon as the leader answers at this address. Each earlier reload would move the focus, and
// a screen reader would read the page from the start again.
"use strict";

const BETWEEN = 2000; // ms between two tries

async function look() {
  const answer = await fetch(location.href, { cache: "no-store" }).catch(() => null); // a failed request is retried like an error status
  if (answer?.ok) location.reload();
  else setTimeout(look, BETWEEN);
}

setTimeout(look, BETWEEN);
