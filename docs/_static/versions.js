// The list of versions beside this one (docs/versions.py writes it); where the site stands alone, nothing is shown.
document.addEventListener("DOMContentLoaded", async () => {
  const place = document.querySelector(".versions");
  if (!place || location.protocol === "file:") return;
  const root = new URL(document.documentElement.dataset.content_root || "./", location.href);
  const answer = await fetch(new URL("../versions.json", root)).catch(() => null);
  if (!answer || !answer.ok) return;
  const versions = await answer.json();
  const here = root.pathname.split("/").at(-2);
  const choice = document.createElement("select");
  choice.setAttribute("aria-label", "Version of this site");
  for (const name of versions) choice.add(new Option(name, name, name === here, name === here));
  // The same page may not be in the other version: its front page is.
  choice.addEventListener("change", () => location.assign(new URL(`../${choice.value}/index.html`, root)));
  place.append("Version ", choice);
  place.hidden = false;
});
