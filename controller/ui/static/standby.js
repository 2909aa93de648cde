// Shows the figures as soon as they are to be had here. Until then nothing is loaded again: that would take the focus,
// and whoever has the page read out would hear it from the start each time.
"use strict";

const BETWEEN = 2000; // ms between two tries

async function look() {
  const answer = await fetch(location.href, { cache: "no-store" }).catch(() => null); // the next try tells
  if (answer?.ok) location.reload();
  else setTimeout(look, BETWEEN);
}

setTimeout(look, BETWEEN);
