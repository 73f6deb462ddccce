"""The page's script: values at the pointer, and the theme's button. The page can also be read without it."""

JS = """
(() => {
  const data = JSON.parse(document.getElementById('data').textContent), tip = document.getElementById('tip');
  const plots = [...document.querySelectorAll('.plot')], steps = data.steps;
  const first = steps[0], span = Math.max(steps[steps.length - 1] - first, 1);
  const short = (v, digits) => {
    if (v === null) return '–';
    if (digits === null) {
      const units = ['', 'k', 'M', 'B', 'T'];
      let i = 0;
      while (Math.abs(v) >= 999.5 && i < 4) { v /= 1000; i++; }
      return v.toPrecision(3) + units[i];
    }
    return v !== 0 && Math.abs(v) < 0.01 ? v.toExponential(2) : v.toFixed(digits);
  };
  const nearest = (step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; steps[mid] < step ? low = mid : high = mid; }
    return Math.abs(steps[low] - step) < Math.abs(steps[high] - step) ? low : high;
  };
  const hide = () => {
    tip.style.display = 'none';
    plots.forEach((p) => p.querySelector('.cross').style.display = 'none');
  };
  const show = (plot, index, x, y) => {
    const chart = data.charts[plot.dataset.chart], left = 100 * (steps[index] - first) / span + '%';
    plots.forEach((p) => {
      const cross = p.querySelector('.cross');
      cross.style.display = 'block';
      cross.style.left = left;
    });
    tip.textContent = '';
    const line = (name, value) => {
      const row = document.createElement('div'), label = document.createElement('span');
      label.textContent = name;
      row.append(label, value);
      tip.append(row);
    };
    line(data.name, steps[index].toLocaleString('en'));
    chart.series.forEach((s) => {
      if (s.values[index] !== null) line(s.name, short(s.values[index], chart.digits) + chart.unit);
    });
    tip.style.display = 'block';
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + 'px';
    tip.style.top = Math.max(6, y - box.height - 12) + 'px';
  };
  plots.forEach((plot) => {
    let at = steps.length - 1;
    plot.addEventListener('pointermove', (e) => {
      const box = plot.getBoundingClientRect();
      at = nearest(first + span * (e.clientX - box.left) / box.width);
      show(plot, at, e.clientX, e.clientY);
    });
    plot.addEventListener('pointerleave', hide);
    plot.addEventListener('blur', hide);
    plot.addEventListener('keydown', (e) => {
      if (e.key !== 'ArrowLeft' && e.key !== 'ArrowRight') return;
      e.preventDefault();
      at = Math.max(0, Math.min(steps.length - 1, at + (e.key === 'ArrowLeft' ? -1 : 1)));
      const box = plot.getBoundingClientRect();
      show(plot, at, box.left + box.width * (steps[at] - first) / span, box.top + 60);
    });
  });
  const root = document.documentElement, button = document.getElementById('theme');
  button.hidden = false;
  button.addEventListener('click', () => {
    const system = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
    const dark = (root.dataset.theme || system) === 'dark';
    root.dataset.theme = dark ? 'light' : 'dark';
  });
})();
"""
