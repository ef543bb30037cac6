// Runs the script of a page on as much of a browser as it asks for. Reads {script, data, width, events} from stdin,
// and prints what the page then shows. An event is [id, type, {fields of the event, and of the element}].
"use strict";

class Element {
  constructor() {
    Object.assign(this, { style: {}, children: [], className: "", title: "", textContent: "", value: "0" });
    Object.assign(this, { clientWidth: input.width, heard: {}, scrollTo: 0, attributes: {}, classList: new Set() });
  }
  addEventListener(type, call) { this.heard[type] = call; }
  setAttribute(name, value) { this.attributes[name] = value; }
  replaceChildren(...children) { this.children = children; }
  getBoundingClientRect() { return { left: 0, width: this.clientWidth }; }
  get scrollLeft() { return this.scrollTo; }
  set scrollLeft(to) {
    const widest = parseFloat(found("strip").style.width ?? "0") - this.clientWidth;
    this.scrollTo = Math.max(0, Math.min(to, widest));
  }
}

const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
const elements = {};
const found = (id) => (elements[id] ??= Object.assign(new Element(), { id }));
globalThis.document = { getElementById: found, createElement: () => new Element(), documentElement: new Element() };
globalThis.window = new Element();
found("step").textContent = input.data;
found("course-at").value = "0";
new Function(input.script)();
for (const [id, type, { clientX, key, ...fields }] of input.events) {
  Object.assign(found(id), fields);
  found(id).heard[type]({ clientX, key, preventDefault() {} });
}
const blocks = found("strip").children.map(({ className, style, textContent, title }) => ({ className, ...style, text: textContent, title }));
console.log(JSON.stringify({
  blocks,
  strip: found("strip").style,
  rows: found("rows").children.map(({ textContent }) => textContent),
  course: found("course-told").textContent,
  lanes: found("lanes-told").textContent,
  scroll: found("view").scrollLeft,
}));
