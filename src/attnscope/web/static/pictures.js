// The tab of pictures: drop one, ask one or two questions, and see a heat map for each token.
import {guarded, showStatus, work} from "./api.js";
import {area, firstHere, group, labelled, make, modelChoices, select} from "./dom.js";
import {set, state} from "./state.js";

// A larger file is made smaller before it is sent.
const MOST_BYTES = 1_400_000,
  LARGEST_FILE = 64 * 2 ** 20,
  SIDE = 1024;
const urlOf = (blob) =>
  new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error("the file cannot be read"));
    reader.readAsDataURL(blob);
  });
const smaller = async (file) => {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read as a picture`);
  }
  const by = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  const canvas = make("canvas", {
    width: Math.max(1, Math.round(picture.width * by)),
    height: Math.max(1, Math.round(picture.height * by)),
  });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
};
const dataUrl = async (file) => {
  if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than 64 MiB`);
  if (file.size > MOST_BYTES) return smaller(file);
  const url = await urlOf(file);
  return url.startsWith("data:image/") ? url : url.replace(/^data:[^;,]*/, "data:image/unknown");
};

export const pictures = (host, choices) => {
  let image = null;
  const models = choices.models;
  const first = models.find((m) => m.name === "zoo:shapes-vlm" && m.here);
  const model = select(
    "model for pictures",
    modelChoices(models),
    state.seeing || (first?.name ?? firstHere(models)),
    (value) => set({seeing: value}),
  );
  const preview = make("img", {alt: "the chosen picture", hidden: true}),
    name = make("span", {textContent: "Drop a picture here, or choose a file"});
  const take = guarded(async (file) => {
    if (!file) return;
    image = await dataUrl(file);
    preview.src = image;
    preview.hidden = false;
    name.textContent = file.name;
    showStatus("");
  });
  const file = make("input", {
    type: "file",
    accept: "image/*",
    id: "picture-file",
    "aria-label": "picture",
    onchange: () => take(file.files[0]),
  });
  const drop = group("drop", preview, name, " ", file);
  for (const kind of ["dragover", "drop"])
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      if (kind === "drop") take(event.dataTransfer.files[0]);
    });
  const one = area("question", "question", state.question, "What color is the star?", (value) =>
    set({question: value}),
    "low",
  );
  const two = area(
    "question-2",
    "second question about the same picture",
    state.question2,
    "A second question, to compare (optional)",
    (value) => set({question2: value}),
    "low",
  );
  const completion = make("input", {
    type: "number",
    min: 0,
    max: choices.completion,
    value: 8,
    id: "picture-completion",
    size: 4,
  });
  const shown = group("side");
  const measure = guarded(async () => {
    if (!image) throw new Error("drop a picture first");
    const questions = [one.value, two.value].filter((text, n) => n === 0 || text.trim());
    const body = {model: model.value, image, questions, completion: Number(completion.value)};
    const result = await work("/api/pictures", body, {replaces: "pictures"});
    if (!result) return;
    shown.replaceChildren(
      ...result.pages.map((id, n) => {
        const frame = make("iframe", {
          title: `attention over the picture: ${questions[n]}`,
          src: `/api/pictures/${id}.html`,
        });
        frame.setAttribute("sandbox", "allow-scripts allow-downloads");
        return make("div", {}, make("h2", {textContent: questions[n]}), frame);
      }),
    );
  });
  for (const box of [one, two])
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) measure();
    });
  host.replaceChildren(
    group(
      "card",
      group("controls", labelled("Model", model)),
      drop,
      one,
      two,
      group(
        "controls",
        make("button", {
          className: "main",
          id: "measure-picture",
          textContent: "Measure",
          title: "Ctrl+Enter",
          onclick: measure,
        }),
        labelled("tokens to generate", completion),
      ),
    ),
    shown,
  );
};
