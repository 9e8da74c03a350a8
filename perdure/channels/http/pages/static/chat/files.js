/** Files: those of the message that is being written (chosen, pasted or dropped, and uploaded at once), and those of
 * messages that are shown: an image is loaded when it comes into view, any file is saved by a click. */

import { Refused } from "./api.js";
import { byId, element, leaveFocus } from "./elements.js";

const MOST = 20;

export class Files {
  /** @param {(file: File) => Promise<{ file_id: string, media_type: string }>} upload */
  constructor(upload) {
    this.upload = upload;
    /** @type {{ part: object | null, done: Promise<void>, chip: HTMLElement }[]} */
    this.chosen = [];
  }

  /** Let the user choose files, paste them into the text, and drop them anywhere on the page. */
  bind(text) {
    const input = byId("file"), app = byId("app");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => { this.add(input.files); input.value = ""; });
    text.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    const carries = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!carries(event)) return;
      event.preventDefault(); // else the browser leaves the page to show the file
      app.classList.add("dropping");
    });
    document.addEventListener("dragleave", (event) => { if (event.relatedTarget === null) app.classList.remove("dropping"); });
    document.addEventListener("drop", (event) => {
      app.classList.remove("dropping");
      if (!carries(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
      text.focus();
    });
  }

  add(files) {
    for (const file of files) {
      if (this.chosen.length >= MOST) {
        this.#refuse(this.#chip(file.name, null), `a message has at most ${MOST} files.`);
        continue;
      }
      const made = this.#chosen(file.name, null);
      made.chip.setAttribute("aria-busy", "true");
      made.done = this.upload(file).then((stored) => {
        const type = stored.media_type.startsWith("image/") ? "image" : "file";
        made.part = { type, file_id: stored.file_id, name: file.name };
      }, (error) => {
        if (!this.chosen.includes(made)) return; // removed while it was uploaded
        this.chosen = this.chosen.filter((each) => each !== made);
        this.#refuse(made.chip, error instanceof Refused ? error.message : "the connection was lost. Add it again.");
      }).finally(() => made.chip.removeAttribute("aria-busy"));
    }
  }

  get any() {
    return this.chosen.length > 0;
  }

  /** The parts of the chosen files, once they are uploaded; `null` if one was refused. The next message has none. */
  async take() {
    const taken = this.chosen;
    await Promise.all(taken.map((each) => each.done));
    if (taken.some((each) => each.part === null && each.chip.isConnected)) return null;
    this.chosen = this.chosen.filter((each) => !taken.includes(each));
    byId("files").replaceChildren(...this.chosen.map((each) => each.chip));
    return taken.filter((each) => each.part !== null).map((each) => each.part);
  }

  /** Choose again the files of a message that was not accepted. */
  restore(parts) {
    for (const part of parts.filter((each) => each.type !== "text")) this.#chosen(part.name, part);
  }

  #chosen(name, part) {
    const made = { part, done: Promise.resolve(), chip: null };
    made.chip = this.#chip(name, () => { this.chosen = this.chosen.filter((each) => each !== made); });
    this.chosen.push(made);
    return made;
  }

  #chip(name, onRemove) {
    const chip = element("li", {}, element("span", { title: name }, name), element("button", {
      type: "button", className: "quiet", "aria-label": `Remove ${name}`, onclick: () => { onRemove?.(); leaveFocus(chip); chip.remove(); },
    }, "✕"));
    byId("files").append(chip);
    return chip;
  }

  /** Say in a file's place why it is not sent. */
  #refuse(chip, why) {
    chip.className = "refused";
    chip.setAttribute("role", "alert");
    chip.firstChild.textContent += `: ${why}`;
  }
}

/** A file of a message: its name, and for an image its place until it is loaded. */
export function shownFile(part) {
  const name = part.name || part.type;
  const made = element("button", {
    type: "button", className: "file", title: `Save ${name}`, "data-file": part.file_id, "data-name": name,
  }, part.type === "image" ? element("img", { alt: name, width: part.width || 320, height: part.height || 240 }) : name);
  made.classList.toggle("image", part.type === "image");
  return made;
}

/** Load the images of `log` when they come into view, and save a file when it is clicked. */
export function loadFiles(log, load, onTrouble) {
  const url = async (shown) => URL.createObjectURL(await load(shown.dataset.file));
  const views = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      views.unobserve(target);
      const image = target.querySelector("img");
      url(target).then((found) => {
        image.onload = () => URL.revokeObjectURL(found);
        image.src = found;
      }, () => image.replaceWith(target.dataset.name));
    }
  });
  new MutationObserver((changes) => {
    for (const node of changes.flatMap((each) => [...each.addedNodes])) {
      for (const each of node.querySelectorAll?.(".file.image") ?? []) if (!each.querySelector("img")?.src) views.observe(each);
    }
  }).observe(log, { childList: true });
  log.addEventListener("click", async (event) => {
    const shown = event.target.closest(".file");
    if (shown === null) return;
    try {
      const found = await url(shown);
      element("a", { href: found, download: shown.dataset.name }).click();
      setTimeout(() => URL.revokeObjectURL(found), 60_000);
    } catch (error) {
      onTrouble(`${shown.dataset.name}: ${error.message}`);
    }
  });
}
