"use strict";
// Tells what is at a place of the course of memory, and lays out the lanes. Names are only ever set as text.
(() => {
  const step = JSON.parse(document.getElementById("step").textContent);
  const find = (name) => document.getElementById(name);

  const sized = (nbytes) => {
    for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (nbytes >= 0.9995 * size) return `${Number((nbytes / size).toPrecision(3))} ${unit}`;
    }
    return `${nbytes} B`;
  };
  const timed = (ns) => {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (ns >= 0.9995 * size) return `${Number((ns / size).toPrecision(3))} ${unit}`;
    }
    return `${ns} ns`;
  };

  /** A time on an axis, in digits that tell it from the next mark. */
  const marked = (ns, every) => {
    const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, each]) => ns + every >= each) ?? ["ns", 1];
    return `${(ns / size).toFixed(Math.max(0, Math.ceil(-Math.log10(every / size) - 1e-9)))} ${unit}`;
  };

  // -- bytes over the step

  const followCourse = () => {
    const [at, plot, cursor, told] = ["course-at", "course-plot", "course-cursor", "course-told"].map(find);
    const tell = () => {
      const number = Number(at.value);
      const [phase, place, nbytes] = step.course[number];
      const parts = step.categories.map((name, index) => [name, nbytes[index]]).filter(([, bytes]) => bytes > 0);
      const total = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
      parts.sort((one, other) => other[1] - one[1]);
      const where = [...new Set([step.phases[phase], step.names[place]])].filter(Boolean).join(", ");
      told.textContent = `${where}: ${sized(total)} (${parts.map(([name, bytes]) => `${name} ${sized(bytes)}`).join(", ")})`;
      at.setAttribute("aria-valuetext", told.textContent);
      cursor.style.left = `${((number + 0.5) / step.course.length) * 100}%`;
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      at.value = Math.floor(((event.clientX - box.left) / box.width) * step.course.length);
      tell();
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    at.addEventListener("input", tell);
    tell();
  };

  // -- lanes

  const [ROW, TOP, LEAST, WIDEST] = [32, 44, 3, 8e6]; // px: of a row, above the rows, of a block, of the strip
  const KINDS = ["compute", "at-once", "link", "host"];
  const [BEGIN, END, NAME, BYTES, BY] = [0, 1, 2, 3, 4]; // of a span; times in ns

  const layLanes = () => {
    const [view, strip, names, told] = ["view", "strip", "rows", "lanes-told"].map(find);
    const rows = step.rows.map((spans, kind) => ({ kind, spans })).filter(({ spans }) => spans.length);
    const end = Math.max(1, step.ns, ...rows.map(({ spans }) => spans[spans.length - 1][END]));
    let zoom = 1;
    let here = [0, 0]; // row, span
    const width = () => Math.min(WIDEST, Math.max(view.clientWidth, 1) * zoom);
    const made = (kind, left, text) => {
      const one = document.createElement("div");
      one.className = kind;
      one.style.left = `${left}px`;
      one.textContent = text;
      return one;
    };

    /** The first span of a row that ends after a time. */
    const firstAfter = (spans, time) => {
      let [low, high] = [0, spans.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (spans[middle][END] < time) low = middle + 1;
        else high = middle;
      }
      return low;
    };

    const drawRow = (row, from, to, scale) => {
      const { kind, spans } = rows[row];
      const blocks = [];
      for (let at = firstAfter(spans, from); at < spans.length && spans[at][BEGIN] <= to; ) {
        const first = at;
        const left = spans[at][BEGIN] * scale;
        let right = Math.max(left + LEAST, spans[at][END] * scale);
        // What is too narrow to be seen alone is one block with what comes after it.
        while (++at < spans.length && spans[at][END] * scale < left + LEAST) right = left + LEAST;
        const [shownLeft, shownRight] = [Math.max(left, from * scale), Math.min(right, to * scale)];
        const label = at - first > 1 ? "" : step.names[spans[first][NAME]];
        const block = made(`block ${KINDS[kind]}`, shownLeft, right - left > 24 ? label : "");
        if (right - left <= 24) block.className += " few";
        if (here[0] === row && here[1] >= first && here[1] < at) block.className += " here";
        block.style.width = `${Math.max(LEAST, shownRight - shownLeft)}px`;
        block.style.top = `${TOP + row * ROW}px`;
        block.title = at - first > 1 ? `${at - first} together: zoom in` : `${label}, ${timed(spans[first][END] - spans[first][BEGIN])}`;
        block.addEventListener("click", () => select(row, first));
        blocks.push(block);
      }
      return blocks;
    };

    const draw = () => {
      const scale = width() / end;
      strip.style.width = `${width()}px`;
      strip.style.height = `${TOP + rows.length * ROW}px`;
      const [from, to] = [view.scrollLeft / scale, (view.scrollLeft + view.clientWidth) / scale];
      const shown = step.parts
        .filter(([, begin, until]) => until >= from && begin <= to)
        .map(([phase, begin, until]) => {
          const band = made(`phase ${step.phases[phase]}`, Math.max(begin, from) * scale, step.phases[phase]);
          band.style.width = `${(Math.min(until, to) - Math.max(begin, from)) * scale}px`;
          return band;
        });
      const rough = 90 / scale;
      const power = 10 ** Math.floor(Math.log10(rough));
      const every = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
      for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
        shown.push(made("tick", at * scale, marked(at, every)));
      }
      rows.forEach((_, row) => shown.push(...drawRow(row, from, to, scale)));
      strip.replaceChildren(...shown);
    };

    const tell = () => {
      const { kind, spans } = rows[here[0]];
      const span = spans[here[1]];
      const does = { compute: "reads and writes", "at-once": "", link: "sends", host: "moves" }[KINDS[kind]];
      told.textContent = [
        `${step.rowNames[kind]}: ${step.names[span[NAME]]}`,
        `begins at ${timed(span[BEGIN])}, takes ${timed(span[END] - span[BEGIN])}`,
        does && span[BYTES] ? `${does} ${sized(span[BYTES])}` : "",
        span[BY] >= 0 ? `waited for by ${step.names[span[BY]]}` : "",
      ].filter(Boolean).join("; ");
    };

    const select = (row, at) => {
      here = [row, at];
      const [begin, until] = [rows[row].spans[at][BEGIN], rows[row].spans[at][END]].map((time) => (time * width()) / end);
      if (until < view.scrollLeft || begin > view.scrollLeft + view.clientWidth) {
        view.scrollLeft = (begin + until - view.clientWidth) / 2;
      }
      tell();
      draw();
    };

    const zoomTo = (wanted) => {
      const span = rows[here[0]].spans[here[1]];
      const seen = (time) => time * (width() / end) - view.scrollLeft;
      const middle = (span[BEGIN] + span[END]) / 2;
      const isSeen = seen(middle) >= 0 && seen(middle) <= view.clientWidth;
      const fixed = isSeen ? middle : ((view.scrollLeft + view.clientWidth / 2) / width()) * end;
      const place = seen(fixed);
      zoom = Math.min(Math.max(1, wanted), WIDEST / Math.max(view.clientWidth, 1));
      strip.style.width = `${width()}px`;
      view.scrollLeft = (fixed / end) * width() - place;
      draw();
    };

    const keys = {
      ArrowRight: () => select(here[0], Math.min(here[1] + 1, rows[here[0]].spans.length - 1)),
      ArrowLeft: () => select(here[0], Math.max(here[1] - 1, 0)),
      ArrowUp: () => toRow(-1),
      ArrowDown: () => toRow(1),
      Home: () => select(here[0], 0),
      End: () => select(here[0], rows[here[0]].spans.length - 1),
      "+": () => zoomTo(zoom * 2),
      "=": () => zoomTo(zoom * 2),
      "-": () => zoomTo(zoom / 2),
      0: () => zoomTo(1),
    };
    const toRow = (by) => {
      const row = here[0] + by;
      if (row < 0 || row >= rows.length) return;
      const { spans } = rows[row];
      select(row, Math.min(firstAfter(spans, rows[here[0]].spans[here[1]][BEGIN]), spans.length - 1));
    };

    names.replaceChildren(...rows.map(({ kind }, row) => {
      const one = document.createElement("span");
      one.textContent = step.rowNames[kind];
      one.style.top = `${TOP + row * ROW}px`;
      return one;
    }));
    view.addEventListener("scroll", draw);
    view.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    find("nearer").addEventListener("click", () => zoomTo(zoom * 2));
    find("farther").addEventListener("click", () => zoomTo(zoom / 2));
    find("whole").addEventListener("click", () => zoomTo(1));
    window.addEventListener("resize", draw);
    tell();
    draw();
  };

  document.documentElement.classList.add("scripted");
  followCourse();
  layLanes();
})();
