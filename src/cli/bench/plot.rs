//! A bench as a picture: time against rows or tokens, both in powers of their units, with what memory and arithmetic allow drawn in.
//!
//! A file of its own that fetches nothing; what is drawn says its numbers as titles.

use maud::{Markup, html};

/// Width and height in pixels without the names below, and what lies around the lines: left, top, right, bottom.
const SIZE: (f64, f64) = (860.0, 520.0);
const MARGIN: (f64, f64, f64, f64) = (70.0, 64.0, 24.0, 56.0);
/// Pixels from one name to the next.
const NAME_HEIGHT: f64 = 18.0;
/// Pixels between labels of rows.
const LABEL_WIDTH: f64 = 34.0;
/// Colours of lines, taken in turn.
const NUM_COLOURS: usize = 6;
/// Dashes of floors, likewise.
const NUM_DASHES: usize = 3;

const STYLE: &str = "\
svg { color-scheme: light dark; background: #fcfcfb; --ink: #1c1e21; --muted: #595f67; --line: #d9dce0;\
 --c0: #195f9f; --c1: #b3261e; --c2: #186f31; --c3: #7b3fa0; --c4: #a65a00; --c5: #00707a; }\
@media (prefers-color-scheme: dark) { svg { background: #14171a; --ink: #e6e8ea; --muted: #a3aab2; --line: #353b42;\
 --c0: #66a9dc; --c1: #ff8a80; --c2: #4cc26a; --c3: #c79be8; --c4: #e8a552; --c5: #4fc3cd; } }\
text { font: 12px system-ui, sans-serif; fill: var(--ink); }\
.grid { stroke: var(--line); } .floor { stroke: var(--muted); stroke-dasharray: 6 4; fill: none; }\
.f1 { stroke-dasharray: 2 3; } .f2 { stroke-dasharray: 9 3 2 3; }\
.line { fill: none; stroke-width: 2; }\
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }\
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } circle { fill: #fcfcfb; stroke-width: 2; }";

/// A measurement, or what a floor is there.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Point {
    /// Rows of an expert, or what else the axis counts.
    pub rows: usize,
    /// Microseconds.
    pub us: f64,
    /// What is said of it.
    pub says: String,
}

/// Points that belong together, from few rows to many.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Curve {
    pub name: String,
    pub points: Vec<Point>,
}

impl Curve {
    /// A curve, its points sorted.
    pub(super) fn new(name: String, mut points: Vec<Point>) -> Self {
        points.sort_by_key(|point| point.rows);
        Self { name, points }
    }
}

/// What is drawn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plot {
    /// What was measured, on what.
    pub title: String,
    /// Under the title.
    pub subtitle: String,
    /// What is counted from left to right.
    pub axis: &'static str,
    /// What was measured.
    pub curves: Vec<Curve>,
    /// What can't be beaten.
    pub floors: Vec<Curve>,
}

/// A logarithmic axis: `from` to `to` lie at `start` to `end`.
#[derive(Debug, Clone, Copy)]
struct Axis {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Axis {
    /// Over all values, with a twentieth of room at both ends; a single value lies in the middle.
    fn over(values: impl Iterator<Item = f64> + Clone, (start, end): (f64, f64)) -> Self {
        let (from, to) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max));
        let room = if from < to { (to / from).powf(0.05) } else { 2.0 };
        Self { from: from / room, to: to * room, start, end }
    }

    fn at(self, value: f64) -> f64 {
        self.start + (self.end - self.start) * (value / self.from).ln() / (self.to / self.from).ln()
    }

    /// 1, 2 and 5 times powers of ten that it holds.
    fn ticks(self) -> Vec<f64> {
        let decades = (-3..10).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
        decades.filter(|tick| (self.from..=self.to).contains(tick)).collect()
    }
}

/// A place in pixels, to a tenth.
fn pixels(value: f64) -> String {
    format!("{value:.1}")
}

impl Plot {
    fn points(&self) -> impl Iterator<Item = &Point> + Clone {
        self.curves.iter().chain(&self.floors).flat_map(|curve| &curve.points)
    }

    /// The picture, as a file.
    ///
    /// # Panics
    /// If there is no point.
    pub(super) fn svg(&self) -> String {
        assert!(self.points().next().is_some(), "there is something to draw");
        let (width, height) = SIZE;
        let (left, top, right, bottom) = MARGIN;
        let x = Axis::over(self.points().map(|point| point.rows as f64), (left, width - right));
        let y = Axis::over(self.points().map(|point| point.us), (height - bottom, top));
        let whole = height + NAME_HEIGHT * (self.curves.len() + self.floors.len()) as f64;
        let markup = html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (width) " " (whole) } width=(width) height=(whole) role="img" {
                title { (self.title) ": microseconds against " (self.axis) }
                style { (maud::PreEscaped(STYLE)) }
                text x=(left) y="22" font-weight="bold" { (self.title) }
                text x=(left) y="42" { (self.subtitle) }
                (self.grid(x, y))
                @for (index, floor) in self.floors.iter().enumerate() {
                    @let class = format!("floor f{}", index % NUM_DASHES);
                    polyline class=(class) points=(places(floor, x, y)) { title { (floor.name) } }
                    (legend(self.curves.len() + index, &class, &floor.name))
                }
                @for (index, curve) in self.curves.iter().enumerate() {
                    (measured(curve, &format!("c{}", index % NUM_COLOURS), x, y))
                    (legend(index, &format!("line c{}", index % NUM_COLOURS), &curve.name))
                }
            }
        };
        markup.into_string()
    }

    /// Lines and labels of both axes.
    fn grid(&self, x: Axis, y: Axis) -> Markup {
        let mut rows: Vec<usize> = self.points().map(|point| point.rows).collect();
        rows.sort_unstable();
        rows.dedup();
        let mut last = f64::NEG_INFINITY;
        rows.retain(|rows| {
            let at = x.at(*rows as f64);
            let has_room = at - last >= LABEL_WIDTH;
            last = if has_room { at } else { last };
            has_room
        });
        html! {
            @for tick in y.ticks() {
                line.grid x1=(pixels(x.start)) x2=(pixels(x.end)) y1=(pixels(y.at(tick))) y2=(pixels(y.at(tick))) {}
                text x=(pixels(x.start - 8.0)) y=(pixels(y.at(tick) + 4.0)) text-anchor="end" { (tick) }
            }
            @for rows in rows {
                @let at = pixels(x.at(rows as f64));
                line.grid x1=(at) x2=(at) y1=(pixels(y.start)) y2=(pixels(y.end)) {}
                text x=(at) y=(pixels(y.start + 18.0)) text-anchor="middle" { (rows) }
            }
            text x=(pixels(f64::midpoint(x.start, x.end))) y=(pixels(y.start + 40.0)) text-anchor="middle" { (self.axis) }
            text x=(pixels(x.start - 8.0)) y=(pixels(y.end - 8.0)) text-anchor="end" { "us" }
        }
    }
}

fn places(curve: &Curve, x: Axis, y: Axis) -> String {
    let place = |point: &Point| format!("{},{}", pixels(x.at(point.rows as f64)), pixels(y.at(point.us)));
    curve.points.iter().map(place).collect::<Vec<_>>().join(" ")
}

fn measured(curve: &Curve, colour: &str, x: Axis, y: Axis) -> Markup {
    html! {
        polyline class={ "line " (colour) } points=(places(curve, x, y)) {}
        @for point in &curve.points {
            circle class=(colour) cx=(pixels(x.at(point.rows as f64))) cy=(pixels(y.at(point.us))) r="3.5" {
                title { (curve.name) ", " (point.says) }
            }
        }
    }
}

/// The name of a curve and how it is drawn; names stand below each other under the picture.
fn legend(index: usize, class: &str, name: &str) -> Markup {
    let (left, ..) = MARGIN;
    let y = SIZE.1 + NAME_HEIGHT * index as f64;
    html! {
        line class=(class) x1=(pixels(left + 14.0)) x2=(pixels(left + 42.0)) y1=(pixels(y)) y2=(pixels(y)) {}
        text x=(pixels(left + 50.0)) y=(pixels(y + 4.0)) { (name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(name: &str, points: &[(usize, f64)]) -> Curve {
        let point = |&(rows, us): &(usize, f64)| Point { rows, us, says: format!("{rows} rows: {us} us") };
        Curve::new(name.to_owned(), points.iter().map(point).collect())
    }

    fn plot() -> Plot {
        Plot {
            title: "a & b <c>".to_owned(),
            subtitle: "of a GPU".to_owned(),
            axis: "rows an expert",
            curves: vec![curve("uniform", &[(64, 500.0), (1, 250.0), (8, 260.0), (9, 261.0)])],
            floors: vec![curve("memory", &[(1, 230.0), (64, 230.0)]), curve("arithmetic", &[(1, 5.0), (64, 320.0)])],
        }
    }

    /// Values of an attribute, in order.
    fn values<'a>(svg: &'a str, attribute: &str) -> Vec<&'a str> {
        svg.split(&format!(" {attribute}=\"")).skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
    }

    fn numbers(values: &[&str]) -> Vec<f64> {
        values.iter().map(|value| value.parse().unwrap()).collect()
    }

    #[test]
    fn an_axis_is_logarithmic_and_holds_all() {
        let axis = Axis::over([1.0, 100.0, 10.0].into_iter(), (0.0, 110.0));
        for (value, wanted) in [(1.0, 5.0), (10.0, 55.0), (100.0, 105.0)] {
            assert!((axis.at(value) - wanted).abs() < 1e-9, "{value} is at {}", axis.at(value));
        }
        assert_eq!(axis.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        let single = Axis::over(std::iter::once(7.0), (0.0, 10.0));
        assert!((single.at(7.0) - 5.0).abs() < 1e-9);
    }

    #[test]
    fn points_lie_where_their_numbers_say() {
        let svg = plot().svg();
        let (xs, ys) = (numbers(&values(&svg, "cx")), numbers(&values(&svg, "cy")));
        let rows = [1.0_f64, 8.0, 9.0, 64.0];
        // A step of the same factor is one of the same length: 8 is half of the way to 64.
        for (at, rows) in xs.iter().zip(rows) {
            let wanted = xs[0] + (xs[3] - xs[0]) * rows.ln() / 64_f64.ln();
            assert!((at - wanted).abs() < 0.11, "{rows} rows at {at} instead of {wanted}");
        }
        assert!(ys[0] > ys[1] && ys[1] > ys[3], "longer times lie higher: {ys:?}");
        let lines = values(&svg, "points");
        assert_eq!(lines.len(), 3);
        let of_memory: Vec<&str> = lines[0].split([' ', ',']).collect();
        assert_eq!(of_memory[1], of_memory[3], "a constant floor is level");
        assert_eq!(
            numbers(&[of_memory[0], of_memory[2]]),
            [xs[0], xs[3]],
            "floors are drawn at the rows that were timed"
        );
        let arithmetic: Vec<&str> = lines[1].split([' ', ',']).collect();
        let slope = numbers(&arithmetic);
        assert!(slope[3] < numbers(&of_memory)[3] && slope[1] > numbers(&of_memory)[1], "floors cross");
        let everything: Vec<f64> =
            lines.iter().flat_map(|line| numbers(&line.split([' ', ',']).collect::<Vec<_>>())).collect();
        assert!(everything.iter().all(|place| (0.0..SIZE.0).contains(place)), "{everything:?}");
    }

    #[test]
    fn what_is_drawn_says_its_numbers_and_is_escaped() {
        let svg = plot().svg();
        for part in ["uniform, 64 rows: 500 us", "<title>memory</title>", "a &amp; b &lt;c&gt;", ">uniform</text>"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" ") && svg.ends_with("</svg>"));
        assert!(!svg.contains("<script") && !svg.contains("href"));
        let labels = svg.matches(">9</text>").count();
        assert_eq!(labels, 0, "9 rows have no room for a label beside 8");
        assert_eq!(svg.matches("<line class=\"line c0\"").count() + svg.matches("<line class=\"floor f").count(), 3);
    }

    #[test]
    fn one_point_alone_can_be_drawn() {
        let alone = Plot { curves: vec![curve("uniform", &[(16, 300.0)])], floors: Vec::new(), ..plot() };
        let svg = alone.svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(values(&svg, "cx").len(), 1);
    }
}
