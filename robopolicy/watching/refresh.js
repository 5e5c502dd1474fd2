// Fetches the page again and replaces the parts of <main> that have changed, so that films play on and chosen runs
// stay chosen. Without JavaScript the page works too, and is reloaded by hand.
"use strict";
const EVERY = 2000;
const seen = new Map();

function remember(part) {
  seen.set(part.dataset.part, part.outerHTML);
}

function keep(before, after) {
  for (const box of before.querySelectorAll("input:checked")) {
    const same = [...after.querySelectorAll("input")].find((each) => each.value === box.value);
    if (same) same.checked = true;
  }
  const opened = [...before.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
  for (const summary of after.querySelectorAll("summary")) {
    if (opened.includes(summary.textContent)) summary.parentElement.open = true;
  }
}

function update(page) {
  const main = document.querySelector("main");
  const before = new Map([...main.children].map((part) => [part.dataset.part, part]));
  let previous = null;
  for (const part of [...page.querySelector("main").children]) {
    const old = before.get(part.dataset.part);
    before.delete(part.dataset.part);
    if (old && seen.get(part.dataset.part) === part.outerHTML) {
      previous = old;
      continue;
    }
    remember(part);
    if (old) {
      keep(old, part);
      old.replaceWith(part);
    } else if (previous) {
      previous.after(part);
    } else {
      main.prepend(part);
    }
    previous = part;
  }
  for (const gone of before.values()) gone.remove();
  document.title = page.title;
}

async function refresh() {
  try {
    if (!document.hidden) {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.ok) update(new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
  }
  setTimeout(refresh, EVERY);
}

for (const part of document.querySelector("main").children) remember(part);
setTimeout(refresh, EVERY);
