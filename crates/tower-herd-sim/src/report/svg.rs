//! Small plots as inline SVG: no script, no network, colours from the page's style sheet.

/// How the vertical axis is divided.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    /// Logarithm of one plus the value, so that zero has a place.
    Log,
}

/// How a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Filled down to zero, constant between points.
    Steps,
    /// A line that is constant between points.
    StepLine,
    /// A line from point to point.
    Line,
}

/// One series: points by x, drawn with a class of the style sheet.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) class: String,
    pub(super) mark: Mark,
    pub(super) points: Vec<(f64, f64)>,
}

/// One plot.
pub(super) struct Plot {
    /// Unique in the page.
    pub(super) id: String,
    pub(super) title: String,
    /// What one sees, for those who cannot.
    pub(super) text: String,
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) max_x: f64,
    pub(super) max_y: f64,
    pub(super) scale: Scale,
    pub(super) series: Vec<Series>,
}

const LEFT: f64 = 44.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 22.0;

impl Plot {
    fn x(&self, v: f64) -> f64 {
        LEFT + (self.width - LEFT - RIGHT) * (v / self.max_x).clamp(0.0, 1.0)
    }

    fn y(&self, v: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => v / self.max_y,
            Scale::Log => v.max(0.0).ln_1p() / self.max_y.ln_1p(),
        };
        self.height - BOTTOM - (self.height - TOP - BOTTOM) * share.clamp(0.0, 1.0)
    }

    fn y_ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => ticks(self.max_y, 4),
            Scale::Log => {
                let decades = std::iter::successors(Some(1.0), |v| Some(v * 10.0));
                std::iter::once(0.0).chain(decades.take_while(|v| *v <= self.max_y)).collect()
            }
        }
    }

    fn path(&self, series: &Series) -> String {
        let mut d = String::new();
        let mut last = None;
        for (i, (x, y)) in series.points.iter().enumerate() {
            let (px, py) = (self.x(*x), self.y(*y));
            match (i, series.mark, last) {
                (0, Mark::Steps, _) => {
                    put!(d, "M{px:.1} {:.1}V{py:.1}", self.y(0.0));
                }
                (0, ..) => {
                    put!(d, "M{px:.1} {py:.1}");
                }
                (_, Mark::Line, _) => {
                    put!(d, "L{px:.1} {py:.1}");
                }
                // A run of equal values needs no points in between.
                (_, _, Some(before)) if before == py && i + 1 < series.points.len() => {}
                _ => {
                    put!(d, "H{px:.1}V{py:.1}");
                }
            }
            last = Some(py);
        }
        if series.mark == Mark::Steps && last.is_some() {
            put!(d, "V{:.1}Z", self.y(0.0));
        }
        d
    }

    /// The plot as an SVG element.
    pub(super) fn svg(&self) -> String {
        let (w, h) = (self.width, self.height);
        let mut out = format!(
            "<svg role=\"img\" viewBox=\"0 0 {w} {h}\" aria-labelledby=\"{id}-t {id}-d\">\
             <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>",
            escape(&self.title),
            escape(&self.text),
            id = self.id,
        );
        for v in self.y_ticks() {
            let y = self.y(v);
            put!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                w - RIGHT,
                LEFT - 5.0,
                y + 3.5,
                number(v),
            );
        }
        for v in ticks(self.max_x, 6) {
            let x = self.x(v);
            put!(
                out,
                "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} s</text>",
                h - 6.0,
                number(v),
            );
        }
        for series in self.series.iter().filter(|s| !s.points.is_empty()) {
            let fill = if series.mark == Mark::Steps { "area" } else { "line" };
            put!(
                out,
                "<path class=\"{fill} {}\" d=\"{}\"><title>{}</title></path>",
                series.class,
                self.path(series),
                escape(&series.name),
            );
            if let (Mark::Line, Some((x, y))) = (series.mark, series.points.last()) {
                let (x, y) = (self.x(*x), self.y(*y));
                put!(out, "<circle class=\"{}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\"/>", series.class);
            }
        }
        out.push_str("</svg>");
        out
    }
}

/// About `n` round values from zero to `max`.
fn ticks(max: f64, n: u32) -> Vec<f64> {
    let step = nice(max / f64::from(n));
    std::iter::successors(Some(0.0), |v| Some(v + step)).take_while(|v| *v <= max * 1.0001).collect()
}

/// The next of 1, 2, 5, 10, ... times a power of ten.
pub(super) fn nice(x: f64) -> f64 {
    if !x.is_finite() || x <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(x.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|v| *v >= x * 0.999).unwrap_or(power * 10.0)
}

fn number(v: f64) -> String {
    if v >= 10_000.0 {
        format!("{}k", v / 1000.0)
    } else if (v - v.round()).abs() < 1e-9 {
        format!("{v:.0}")
    } else {
        format!("{v:.2}").trim_end_matches('0').to_string()
    }
}

/// Text made safe for HTML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_numbers() {
        assert_eq!(nice(0.3), 0.5);
        assert_eq!(nice(7.0), 10.0);
        assert_eq!(nice(20.0), 20.0);
        assert_eq!(ticks(47.0, 6).len(), 5);
        assert_eq!(number(0.5), "0.5");
        assert_eq!(escape("<a&\"b\">"), "&lt;a&amp;&quot;b&quot;&gt;");
    }

    #[test]
    fn steps_skip_what_does_not_change() {
        let plot = Plot {
            id: "p".into(),
            title: "t".into(),
            text: "d".into(),
            width: 100.0,
            height: 60.0,
            max_x: 10.0,
            max_y: 2.0,
            scale: Scale::Linear,
            series: vec![Series {
                name: "s".into(),
                class: "calls".into(),
                mark: Mark::StepLine,
                points: vec![(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (3.0, 2.0)],
            }],
        };
        let svg = plot.svg();
        assert_eq!(svg.matches('H').count(), 1, "{svg}");
        assert!(svg.contains("aria-labelledby=\"p-t p-d\""));
    }
}
