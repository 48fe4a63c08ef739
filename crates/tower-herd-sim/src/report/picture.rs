//! Runs side by side in one standalone SVG, as a README shows them.
#![allow(clippy::let_underscore_must_use, reason = "writing to a String does not fail")]

use std::fmt::Write;

use super::html::{arrivals, seconds};
use super::svg::{escape, nice};
use crate::scenario::Run;

const STYLE: &str = include_str!("style.css");
const MARGIN: f64 = 16.0;
const HEAD: f64 = 64.0;
const GAP: f64 = 24.0;

/// Arrivals a second at each rung, one column a run, on common scales. Follows the reader's light or
/// dark scheme; loads nothing.
pub fn picture(runs: &[Run]) -> String {
    let max_x = runs.iter().map(|run| seconds(run.elapsed)).fold(0.1, f64::max);
    let step = nice(max_x / 160.0);
    let rungs = runs.iter().map(|run| run.rungs.len()).max().unwrap_or(0);
    let (width, height) = (440.0, 140.0);
    let total_width = 2.0 * MARGIN + runs.len() as f64 * (width + GAP) - GAP;
    let total_height = HEAD + rungs as f64 * (height + GAP) + MARGIN;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {total_width:.0} {total_height:.0}\" \
         width=\"{total_width:.0}\" height=\"{total_height:.0}\" role=\"img\">\
         <style>{STYLE}\nsvg {{ width: auto; }} text {{ fill: var(--ink); font: 14px system-ui, sans-serif; }} \
         .head {{ font-weight: 600; }} .small {{ fill: var(--soft); font-size: 12px; }} \
         text.tick {{ fill: var(--soft); font: 10.5px system-ui, sans-serif; }}</style>\
         <rect width=\"100%\" height=\"100%\" style=\"fill: var(--paper)\"/>"
    );
    for (column, run) in runs.iter().enumerate() {
        let left = MARGIN + column as f64 * (width + GAP);
        let stats = run.stats();
        let _ = write!(
            out,
            "<text class=\"head\" x=\"{left}\" y=\"28\">{}: {} of {} tasks done</text>\
             <text class=\"small\" x=\"{left}\" y=\"46\">{} calls, {} of them refused (red), {:.0} s</text>",
            escape(run.policy),
            run.done(),
            run.settings.tasks,
            stats.wire_calls,
            stats.throttled,
            seconds(run.elapsed),
        );
        for rung in 0..run.rungs.len() {
            let top = HEAD + rung as f64 * (height + GAP);
            let max_y = runs
                .iter()
                .enumerate()
                .filter(|(_, other)| rung < other.rungs.len())
                .map(|(i, other)| arrivals(other, i, rung, max_x, step).max_y)
                .fold(1.0, f64::max);
            let mut plot = arrivals(run, column, rung, max_x, step);
            plot.max_y = max_y;
            let nested = plot.svg().replacen(
                "<svg ",
                &format!(
                    "<svg x=\"{left}\" y=\"{:.0}\" width=\"{width}\" height=\"{height}\" style=\"width:{width}px;height:{height}px\" ",
                    top + 14.0
                ),
                1,
            );
            let _ = write!(
                out,
                "<text class=\"small\" x=\"{left}\" y=\"{:.0}\">rung {}: arrivals a second</text>{nested}",
                top + 10.0,
                escape(&run.rungs[rung].name),
            );
        }
    }
    out.push_str("</svg>\n");
    out
}
