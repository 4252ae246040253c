// Elements are made here and nowhere else; text from a run is never markup.

export function byId(id) {
  return document.getElementById(id);
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Rows by key: those that stay are kept, so that focus and selection survive an update.
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let after = null;
  for (const item of items) {
    const key = String(keyOf(item));
    let row = old.get(key);
    if (row) old.delete(key);
    else {
      row = create(item);
      row.dataset.key = key;
    }
    update(row, item);
    const place = after ? after.nextSibling : parent.firstChild;
    if (place !== row) parent.insertBefore(row, place);
    after = row;
  }
  for (const row of old.values()) row.remove();
}

// A small box in a colour of the pictures, by the name of its class there.
export function swatch(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "es swatch");
  svg.setAttribute("viewBox", "0 0 10 10");
  svg.setAttribute("aria-hidden", "true");
  const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  box.setAttribute("class", name);
  box.setAttribute("width", "10");
  box.setAttribute("height", "10");
  svg.append(box);
  return svg;
}

export async function getJson(path, options) {
  const response = await fetch(path, options);
  const content = await response.json();
  if (!response.ok) throw new Error(content.problem || response.statusText);
  return content;
}
