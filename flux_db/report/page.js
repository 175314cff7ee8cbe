// The slider over the rounds of samples, and the values under the pointer in charts.
// The report of a run that goes on is loaded again by itself: what was chosen in it is kept.
var kept = { get: function (name) { try { return sessionStorage.getItem(name); } catch (e) { return null; } },
  set: function (name, value) { try { sessionStorage.setItem(name, value); } catch (e) { /* not allowed */ } } };
document.documentElement.classList.add('js');
document.querySelectorAll('.rounds').forEach(function (box) {
  var rounds = box.querySelectorAll('.round'), input = box.querySelector('input');
  var output = box.querySelector('output'), button = box.querySelector('button');
  function show() {
    rounds.forEach(function (round, i) { round.classList.toggle('on', i === +input.value); });
    output.textContent = rounds[+input.value].querySelector('h3').textContent;
    input.setAttribute('aria-valuetext', output.textContent);
  }
  function showAll(all) {
    box.classList.toggle('all', all);
    button.textContent = all ? 'One step' : 'All steps';
  }
  var place = location.pathname;
  var steps = [].map.call(rounds, function (round) { return round.querySelector('h3').textContent; });
  var chosen = steps.indexOf(kept.get(place + ' step'));
  input.max = rounds.length - 1; input.value = chosen < 0 ? rounds.length - 1 : chosen;
  input.addEventListener('input', function () {
    show();  // at the right end it follows the run
    kept.set(place + ' step', +input.value === rounds.length - 1 ? '' : steps[+input.value]);
  });
  button.addEventListener('click', function () {
    showAll(!box.classList.contains('all'));
    kept.set(place + ' all', box.classList.contains('all') ? 'yes' : '');
  });
  showAll(kept.get(place + ' all') === 'yes');
  show();
});
function short(value) {
  var size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}
document.querySelectorAll('svg[data-box]').forEach(function (svg) {
  var numbers = function (name) { return svg.dataset[name].split(' ').map(Number); };
  var box = numbers('box'), xs = numbers('x'), ys = numbers('y');
  var value = svg.parentNode.querySelector('.value'), before = value.textContent;
  var lines = [].map.call(svg.querySelectorAll('path:not(.faint)'), function (path) {
    return path.getAttribute('d').slice(1).split('L').map(function (pair) { return pair.split(' ').map(Number); });
  });
  var cross = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  cross.setAttribute('class', 'cross'); cross.setAttribute('y1', box[1]); cross.setAttribute('y2', box[1] + box[3]);
  function number(place) { return ys[0] + (1 - (place - box[1]) / box[3]) * (ys[1] - ys[0]); }
  svg.addEventListener('pointermove', function (event) {
    var frame = svg.getBoundingClientRect();
    var at = (event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width, first = null;
    var texts = lines.map(function (points) {
      var near = points.reduce(function (a, b) { return Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a; });
      if (first === null) first = near[0];
      return short(number(near[1]));
    });
    cross.setAttribute('x1', first); cross.setAttribute('x2', first); svg.appendChild(cross);
    var step = Math.round(xs[0] + (first - box[0]) / box[2] * (xs[1] - xs[0]));
    value.textContent = texts.join(' \u00b7 ') + (svg.dataset.unit ? ' ' + svg.dataset.unit : '') + ' at step ' + step;
  });
  svg.addEventListener('pointerleave', function () { value.textContent = before; cross.remove(); });
});
