(() => {
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const isSvg = (element) => element.namespaceURI.endsWith('svg');
  // What text stands on: the cell that was drawn before it, or the nearest ground that is not transparent.
  const ground = (element) => {
    if (isSvg(element) && element.previousElementSibling?.tagName === 'rect') {
      return getComputedStyle(element.previousElementSibling).fill;
    }
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  let worst = { contrast: 99, text: '' };
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim() !== '');
    if (!own || ['title', 'SCRIPT', 'PRE'].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const found = contrast(isSvg(element) ? style.fill : style.color, ground(element));
    if (found < worst.contrast) worst = { contrast: found, text: element.outerHTML.slice(0, 200) };
  }
  const text = (element) => element.textContent.trim();
  const all = (selector, within) => [...(within ?? document).querySelectorAll(selector)];
  const strip = (of) => (element) => ({ rank: text(element.querySelector('.name')), sum: text(element.querySelector('.sum')), pieces: of(element) });
  const cell = (rect) => {
    const label = rect.nextElementSibling?.tagName === 'text' ? text(rect.nextElementSibling) : null;
    return { title: text(rect), label, fill: luminance(getComputedStyle(rect).fill) };
  };
  const piece = (rect) => {
    const whole = rect.parentElement.getBoundingClientRect();
    const drawn = rect.getBoundingClientRect();
    return { title: text(rect), share: drawn.width / whole.width, left: (drawn.left - whole.left) / whole.width };
  };
  return {
    isDark: matchMedia('(prefers-color-scheme: dark)').matches,
    ground: luminance(getComputedStyle(document.body).backgroundColor),
    worst,
    fetched: performance.getEntriesByType('resource').map((entry) => entry.name),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    title: text(document.querySelector('h1')),
    verdict: text(document.querySelector('#checks h2')),
    checks: all('.check').map((check) => all('span', check).map(text)),
    digests: all('#agreement dd > code:first-child').map(text),
    layers: all('details.layer').map((layer) => ({ summary: text(layer.querySelector('summary')), strips: all('.strip', layer).map(strip((of) => all('rect', of).map(cell))) })),
    bars: all('.bars').map((bars) => all('.strip', bars).map(strip((of) => all('rect', of).map(piece)))),
    links: all('#links tbody tr').map((row) => all('td', row).map(text)),
    evidence: all('#evidence tbody tr').map((row) => all('th, td', row).map(text)),
    ranks: all('#ranks tbody tr').map((row) => all('th, td', row).map(text)),
  };
})()
