/** The files of the message that is being written: chosen, pasted or dropped, and uploaded at once. */

import { byId, element } from "./elements.js";

const MOST = 20;

export class Files {
  /**
   * @param {(file: File) => Promise<{ file_id: string, media_type: string }>} upload
   * @param {(text: string) => void} onTrouble
   */
  constructor(upload, onTrouble) {
    this.upload = upload;
    this.onTrouble = onTrouble;
    /** @type {{ name: string, part: object | null, done: Promise<void>, chip: HTMLElement }[]} */
    this.chosen = [];
  }

  /** Let the user choose, paste and drop files. */
  bind(form, text) {
    const input = byId("file");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => { this.add(input.files); input.value = ""; });
    text.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    form.addEventListener("dragover", (event) => event.preventDefault());
    form.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  add(files) {
    for (const file of [...files].slice(0, MOST - this.chosen.length)) {
      const remove = () => { this.chosen = this.chosen.filter((each) => each !== made); made.chip.remove(); };
      const chip = element("li", { "aria-busy": "true" }, file.name,
        element("button", { type: "button", className: "quiet", "aria-label": `Remove ${file.name}`, onclick: remove }, "✕"));
      const made = { name: file.name, part: null, chip, done: Promise.resolve() };
      made.done = this.upload(file).then((stored) => {
        const type = stored.media_type.startsWith("image/") ? "image" : "file";
        made.part = { type, file_id: stored.file_id, name: file.name };
        chip.removeAttribute("aria-busy");
      }, (error) => { remove(); this.onTrouble(`${file.name}: ${error.message}`); });
      this.chosen.push(made);
      byId("files").append(chip);
    }
  }

  get any() {
    return this.chosen.length > 0;
  }

  /** The parts of the chosen files, once they are uploaded. The message that is written next has none. */
  async take() {
    const taken = this.chosen;
    await Promise.all(taken.map((each) => each.done));
    this.chosen = this.chosen.filter((each) => !taken.includes(each));
    for (const each of taken) each.chip.remove();
    return taken.filter((each) => each.part !== null).map((each) => each.part);
  }
}
