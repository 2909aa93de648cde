// Reloads the page as soon as the leader answers at this address. Earlier reloads would move the focus, and a screen
// reader would read the page from the start each time.
"use strict";

const BETWEEN = 2000; // ms between two tries

async function look() {
  const answer = await fetch(location.href, { cache: "no-store" }).catch(() => null); // retried below
  if (answer?.ok) location.reload();
  else setTimeout(look, BETWEEN);
}

setTimeout(look, BETWEEN);
