"use strict";

(() => {
  const dataOf = (id) => {
    const element = document.getElementById(id);
    return element && JSON.parse(element.textContent);
  };

  /** A new element with a text or with children. Text is never read as HTML. */
  const make = (tag, content, className) => {
    const element = document.createElement(tag);
    if (typeof content === "string") element.textContent = content;
    else element.append(...(content || []));
    if (className) element.className = className;
    return element;
  };

  const facts = (pairs) =>
    make("dl", pairs.flatMap(([name, text]) => [make("dt", name), make("dd", text, "mono")]));

  const table = ({ title, head, rows }) => {
    const cells = (tag, texts) => make("tr", texts.map((text) => make(tag, text, tag === "td" ? "mono" : "")));
    const scroll = make("div", [
      make("table", [
        make("thead", [cells("th", head)]),
        make("tbody", rows.map((row) => cells("td", row))),
      ]),
    ], "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", title);
    return make("div", [make("h3", title), scroll]);
  };

  const code = (title, text) => {
    const block = make("pre", [make("code", text)]);
    block.tabIndex = 0;
    return [make("h3", title), block];
  };

  const startStrip = () => {
    const model = dataOf("model-data");
    if (!model) return;
    const panel = document.getElementById("panel");
    const buttons = [...document.querySelectorAll("#strip button")];

    const close = () => {
      panel.hidden = true;
      for (const button of buttons) {
        button.setAttribute("aria-expanded", "false");
        button.classList.remove("same");
      }
    };

    const open = (index) => {
      const step = model.steps[index];
      close();
      panel.replaceChildren(
        make("div", [
          make("div", [make("h3", step.title), facts(step.facts)]),
          ...(step.binding ? [make("div", [make("h3", "Its cache"), facts(step.binding)])] : []),
        ], "pair"),
        ...(step.weights && step.weights.rows.length ? [table(step.weights)] : []),
        ...(step.values ? [make("div", step.values.map(table), "pair")] : []),
        ...(step.code === null ? [] : code("Code", model.code[step.code])),
        ...(model.generated[step.code] ?? []).flatMap(([name, text]) => code(name, text)),
      );
      panel.hidden = false;
      buttons[index].setAttribute("aria-expanded", "true");
      const piece = buttons[index].dataset.piece;
      for (const button of buttons) button.classList.toggle("same", piece !== undefined && button.dataset.piece === piece);
    };

    buttons.forEach((button, index) => {
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-expanded") === "true") close();
        else open(index);
      });
      button.addEventListener("keydown", (event) => {
        const next = buttons[index + { ArrowRight: 1, ArrowLeft: -1 }[event.key]];
        if (next) next.focus();
        if (event.key === "Escape") close();
      });
    });
  };

  const number = (value) => value.toLocaleString("en");

  const seconds = (value) => {
    if (value >= 1) return `${value.toFixed(2)} s`;
    return value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} us`;
  };

  const percent = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)}%`;

  const startTimeline = () => {
    const columns = dataOf("steps-data");
    if (!columns) return;
    const charts = document.getElementById("charts");
    const cursor = document.getElementById("cursor");
    const slider = document.getElementById("slider");
    const readout = document.getElementById("readout");
    const count = columns.first.length;

    const describe = (index) => {
      const [first, last] = [columns.first[index], columns.last[index]];
      const [real, padded] = [columns.tokens[index], columns.padded[index]];
      const modes = Object.entries(columns.modes)
        .filter(([, counts]) => counts[index])
        .map(([mode, counts]) => (first === last ? mode : `${mode} ${number(counts[index])}`));
      const steps = first === last ? `Step ${number(first)}` : `Steps ${number(first)} to ${number(last)}`;
      const time = first === last
        ? seconds(columns.seconds[index])
        : `${seconds(columns.seconds[index])} in all, the slowest ${seconds(columns.slowest[index])}`;
      return [
        make("strong", steps),
        `, ${columns.start[index].toFixed(2)} s after the start: ${number(real)} real tokens, `
          + `${number(padded - real)} padding (${percent(padded - real, padded)}); ${modes.join(", ")}; ${time}`,
      ];
    };

    const requests = (shown, alone) => {
      const reason = shown.reason ? ` (${shown.reason})` : "";
      const what = `${shown.key || shown.mode}${reason}: ${number(shown.tokens)} real of ${number(shown.padded)} tokens`;
      const share = ([name, computed, scheduled, samples]) =>
        `request ${name}: ${scheduled} from position ${computed}${samples ? ", samples" : ""}`;
      const left = shown.num_requests - shown.requests.length;
      const list = shown.requests.map(share).join(" · ") + (left > 0 ? ` · and ${number(left)} more` : "");
      return [
        make("p", alone ? what : `Most padding: step ${number(shown.index)}, ${what}`),
        make("p", `Scheduled tokens of ${number(shown.num_requests)} in all: ${list}`, "muted"),
      ];
    };

    const show = (index) => {
      slider.value = String(index);
      const alone = columns.first[index] === columns.last[index];
      const text = make("p", []);
      text.append(...describe(index));
      slider.setAttribute("aria-valuetext", text.textContent);
      readout.replaceChildren(text, ...requests(columns.shown[index], alone));
      cursor.style.left = `${(100 * (index + 0.5)) / count}%`;
      cursor.hidden = false;
    };

    charts.addEventListener("pointermove", (event) => {
      const box = charts.getBoundingClientRect();
      const index = Math.floor((count * (event.clientX - box.left)) / box.width);
      show(Math.min(count - 1, Math.max(0, index)));
    });
    slider.addEventListener("input", () => show(Number(slider.value)));
    show(0);
  };

  startStrip();
  startTimeline();
})();
