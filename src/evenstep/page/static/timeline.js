// One time axis for all pictures: which stretch is shown, zoom, crosshair.

import { byId, getJson, make, setText, swatch } from "./dom.js";
import { clock, duration, number } from "./words.js";

const REDRAW_MS = 2000; // at most so often while the run goes on
const CLICK_PX = 4; // a drag is longer
const MAX_VALUES = 14;

export class Timeline {
  constructor(names, { onDecision }) {
    this.onDecision = onDecision;
    this.span = [0, 0]; // of the whole run
    this.shown = [0, 0];
    this.isLive = true; // the end follows the newest
    this.isWhole = true; // the beginning is that of the run
    this.drawnAt = 0;
    this.redraw = 0; // timer
    this.pointers = new Map();
    this.figures = Object.entries(names).map(([name, about]) => this.makeFigure(name, about));
    byId("figures").append(...this.figures.map((f) => f.element));
    this.watchSize();
  }

  // News: the run has grown to this span.
  grown(begin, end) {
    const first = this.span[1] === this.span[0];
    this.span = [begin, end];
    if (!this.isLive && !first) return;
    const width = this.shown[1] - this.shown[0];
    this.shown = this.isWhole || first ? [begin, end] : [Math.max(begin, end - width), end];
    this.showWindow();
    this.drawSoon(first ? 0 : REDRAW_MS);
  }

  show(begin, end) {
    const [first, last] = this.span;
    const least = Math.max((last - first) * 1e-5, 0.01);
    let width = Math.min(Math.max(end - begin, least), last - first);
    begin = Math.min(Math.max(begin, first), last - width);
    this.shown = [begin, begin + width];
    this.isWhole = width >= (last - first) * 0.999;
    this.isLive = begin + width >= last - width * 0.001;
    this.showWindow();
    this.drawSoon(0);
  }

  zoom(factor, at = (this.shown[0] + this.shown[1]) / 2) {
    const [begin, end] = this.shown;
    // A stretch that follows the newest goes on to do so.
    const middle = this.isLive && factor < 1 && at === (begin + end) / 2 ? end : at;
    this.show(middle - (middle - begin) * factor, middle + (end - middle) * factor);
  }

  move(part) {
    const by = (this.shown[1] - this.shown[0]) * part;
    this.show(this.shown[0] + by, this.shown[1] + by);
  }

  all() {
    this.show(...this.span);
  }

  live() {
    const width = this.shown[1] - this.shown[0];
    this.show(this.span[1] - width, this.span[1]);
  }

  // A time since the run began; its own clock begins with its coordinator.
  clock(at) {
    return clock(at - this.span[0]);
  }

  showWindow() {
    const [begin, end] = this.shown;
    setText(byId("window"), this.isWhole ? `the whole run, ${duration(end - begin)}` : `${this.clock(begin)} to ${this.clock(end)}`);
    byId("live").setAttribute("aria-pressed", String(this.isLive));
  }

  drawSoon(wait) {
    clearTimeout(this.redraw);
    const due = Math.max(0, wait - (performance.now() - this.drawnAt));
    this.redraw = setTimeout(() => this.draw(), due);
  }

  async draw() {
    if (document.hidden || this.span[1] <= this.span[0]) return;
    this.drawnAt = performance.now();
    const [begin, end] = this.shown;
    const drawings = this.figures.filter((f) => f.isVisible).map((f) => this.drawFigure(f, begin, end));
    await Promise.allSettled(drawings);
  }

  async drawFigure(figure, begin, end) {
    const width = Math.floor(figure.element.clientWidth);
    if (!width) return;
    const key = `${begin} ${end} ${width}`;
    if (figure.drawn === key) return;
    figure.wanted = key;
    const { svg, readout } = await getJson(`/pictures/${figure.name}?begin=${begin}&end=${end}&width=${width}`);
    if (figure.wanted !== key) return; // an answer that came too late
    const picture = svg && document.importNode(new DOMParser().parseFromString(svg, "text/html").querySelector("svg"), true);
    figure.canvas.replaceChildren(...(picture ? [picture, figure.hair, figure.selection] : []));
    figure.canvas.hidden = !picture;
    figure.nothing.hidden = Boolean(picture);
    figure.readout = readout;
    figure.drawn = key;
  }

  makeFigure(name, { title, lacking }) {
    const canvas = make("div", { class: "canvas" });
    const nothing = make("p", { class: "empty", hidden: true }, lacking);
    const element = make("figure", { class: "picture", id: `picture-${name}` }, make("figcaption", {}, title), canvas, nothing);
    const figure = { name, element, canvas, nothing, drawn: "", wanted: "", readout: [], isVisible: false, hair: make("div", { class: "hair", hidden: true }), selection: make("div", { class: "selection", hidden: true }) };
    this.listenTo(figure);
    return figure;
  }

  // Pictures are drawn when they come into sight, and anew when the page's width changes.
  watchSize() {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const figure = this.figures.find((f) => f.element === entry.target);
        figure.isVisible = entry.isIntersecting;
        if (entry.isIntersecting && this.span[1] > this.span[0]) this.drawFigure(figure, ...this.shown);
      }
    }, { rootMargin: "300px" });
    const sized = new ResizeObserver(() => this.drawSoon(100));
    for (const figure of this.figures) seen.observe(figure.element);
    sized.observe(byId("figures"));
  }

  // The plot within a picture, in pixels of the page, with the time it spans.
  plotOf(figure) {
    const svg = figure.canvas.querySelector("svg");
    if (!svg?.dataset.begin) return null;
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    return {
      left: box.left + Number(svg.dataset.left) * scale,
      right: box.left + Number(svg.dataset.right) * scale,
      offset: box.left - figure.canvas.getBoundingClientRect().left,
      boxLeft: box.left,
      begin: Number(svg.dataset.begin),
      end: Number(svg.dataset.end),
    };
  }

  timeAt(figure, x) {
    const plot = this.plotOf(figure);
    if (!plot) return null;
    const part = (x - plot.left) / (plot.right - plot.left);
    return plot.begin + Math.min(Math.max(part, 0), 1) * (plot.end - plot.begin);
  }

  listenTo(figure) {
    const { canvas } = figure;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.pointers.set(event.pointerId, { from: event.clientX, x: event.clientX, type: event.pointerType });
      if (this.pointers.size === 2) this.pinch = { width: this.pinchWidth(), shown: [...this.shown], at: this.timeAt(figure, this.pinchMiddle()) };
    });
    canvas.addEventListener("pointermove", (event) => {
      const pointer = this.pointers.get(event.pointerId);
      if (pointer) pointer.x = event.clientX;
      if (this.pointers.size === 2) this.pinched();
      else {
        if (pointer && pointer.type === "mouse") this.drawSelection(figure, pointer);
        this.cross(figure, event);
      }
    });
    const up = (event) => {
      const pointer = this.pointers.get(event.pointerId);
      this.pointers.delete(event.pointerId);
      figure.selection.hidden = true;
      if (!pointer) return;
      if (this.pinch) {
        this.pinch = null;
        return;
      }
      const far = Math.abs(event.clientX - pointer.from) > CLICK_PX;
      if (event.type === "pointerup" && far && pointer.type === "mouse") {
        const [a, b] = [this.timeAt(figure, pointer.from), this.timeAt(figure, event.clientX)];
        if (a !== null) this.show(Math.min(a, b), Math.max(a, b));
      } else if (event.type === "pointerup" && !far) this.clicked(event);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.uncross();
      if (!event.buttons) up(event);
    });
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // plain scrolling scrolls the page
      event.preventDefault();
      const at = this.timeAt(figure, event.clientX);
      if (at !== null) this.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 50) * 0.01), at);
    }, { passive: false });
  }

  clicked(event) {
    const mark = event.target.closest("[data-decision]");
    if (mark) this.onDecision(Number(mark.dataset.decision));
  }

  drawSelection(figure, pointer) {
    const plot = this.plotOf(figure);
    if (!plot) return;
    const [a, b] = [pointer.from, pointer.x].sort((one, other) => one - other).map((x) => Math.min(Math.max(x, plot.left), plot.right));
    figure.selection.hidden = b - a < CLICK_PX;
    figure.selection.style.left = `${a - plot.boxLeft + plot.offset}px`;
    figure.selection.style.width = `${b - a}px`;
  }

  pinchWidth() {
    const [a, b] = [...this.pointers.values()];
    return Math.max(20, Math.abs(a.x - b.x));
  }

  pinchMiddle() {
    const [a, b] = [...this.pointers.values()];
    return (a.x + b.x) / 2;
  }

  pinched() {
    if (!this.pinch || this.pinch.at === null) return;
    const { shown, at } = this.pinch;
    const factor = this.pinch.width / this.pinchWidth();
    this.show(at - (at - shown[0]) * factor, at + (shown[1] - at) * factor);
  }

  // A line at the same time in all pictures, with the values there.
  cross(figure, event) {
    const at = this.timeAt(figure, event.clientX);
    if (at === null) return;
    for (const each of this.figures) {
      const plot = this.plotOf(each);
      each.hair.hidden = !plot || at < plot.begin || at > plot.end;
      if (!each.hair.hidden) {
        const x = plot.left + ((at - plot.begin) / (plot.end - plot.begin)) * (plot.right - plot.left);
        each.hair.style.left = `${x - plot.boxLeft + plot.offset}px`;
      }
    }
    this.showValues(figure, at, event);
  }

  uncross() {
    for (const each of this.figures) each.hair.hidden = true;
    byId("values").hidden = true;
  }

  showValues(figure, at, event) {
    const box = byId("values");
    const rows = figure.readout.map((series) => [series, valueAt(series, at)]).filter(([, value]) => value !== null);
    box.hidden = !rows.length;
    if (box.hidden) return;
    const cells = rows.slice(0, MAX_VALUES).map(([series, value]) => make("tr", {}, make("th", { scope: "row" }, swatch(series.class.replace(/\bs(-?\w)/g, "f$1")), series.name), make("td", {}, number(value), " ", make("span", { class: "note" }, series.unit))));
    const more = rows.length > MAX_VALUES ? [make("p", {}, `and ${rows.length - MAX_VALUES} more`)] : [];
    box.replaceChildren(make("p", { class: "when" }, this.clock(at)), make("table", {}, make("tbody", {}, ...cells)), ...more);
    const { clientWidth } = document.documentElement;
    const right = event.clientX + 18 + box.offsetWidth > clientWidth;
    box.style.left = `${Math.max(4, right ? event.clientX - 18 - box.offsetWidth : event.clientX + 18)}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8))}px`;
  }
}

// The point in force at a time: the first one that ends at or after it.
function valueAt({ at_s: times, values }, at) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low < times.length ? values[low] : null;
}
