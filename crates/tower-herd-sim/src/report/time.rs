//! Plots over time of scenarios whose tasks arrive by the clock.

use std::time::Duration;

use super::html::seconds;
use super::svg::{Mark, Plot, Scale, Series, escape, nice};
use crate::provider::series;
use crate::scenario::{Run, ramp};

/// What the plot of a way back shows: seconds before the return, and after it.
const BEFORE: f64 = 5.0;
const AFTER: f64 = 75.0;

/// A rate over time in steps, from instants.
fn rate(instants: impl IntoIterator<Item = Duration>, step: f64) -> Vec<(f64, f64)> {
    let counts = series(instants, crate::seconds(step));
    let mut points: Vec<(f64, f64)> =
        counts.iter().enumerate().map(|(i, n)| (i as f64 * step, *n as f64 / step)).collect();
    if let Some(last) = points.last().copied() {
        points.push((last.0 + step, last.1));
    }
    points
}

fn keys(page: &mut String, runs: &[Run], shown: impl IntoIterator<Item = usize>) {
    page.push_str("<p class=\"legend\">");
    for i in shown {
        put!(page, "<span class=\"key p{}\">{}</span>", i % 8, escape(runs[i].policy));
    }
}

fn highest(series: &[Series], least: f64) -> f64 {
    series.iter().flat_map(|s| &s.points).map(|p| p.1).fold(least, f64::max) * 1.05
}

/// Tasks done a second, one line a policy.
pub(super) fn goodput(page: &mut String, runs: &[Run]) {
    let max_x = runs.iter().map(|r| seconds(r.elapsed)).fold(0.1, f64::max);
    let step = nice(max_x / 100.0);
    let lines: Vec<Series> = runs
        .iter()
        .enumerate()
        .map(|(i, run)| Series {
            name: run.policy.into(),
            class: format!("p{}", i % 8),
            mark: Mark::StepLine,
            points: rate(run.completions(), step),
        })
        .collect();
    let text: Vec<String> =
        runs.iter().map(|r| format!("{}: {} of {} done.", r.policy, r.done(), r.settings.tasks)).collect();
    let plot = Plot {
        id: "goodput".into(),
        title: "Goodput: tasks done a second".into(),
        text: text.join(" "),
        width: 900.0,
        height: 240.0,
        max_x,
        max_y: highest(&lines, 1.0),
        scale: Scale::Linear,
        series: lines,
    };
    page.push_str("<h2>Goodput: tasks done a second</h2>");
    keys(page, runs, 0..runs.len());
    put!(
        page,
        "</p><figure>{}<figcaption>The oracle knows every limit, learns of an outage or its end from one reply, and \
         repeats what fails until it is served.</figcaption></figure>",
        plot.svg()
    );
}

/// The minute after an outage, against the ramp.
pub(super) fn comeback(page: &mut String, runs: &[Run], shown: &[usize]) {
    let Some((_, to)) = runs[0].settings.outage_at() else { return };
    let from = to.saturating_sub(crate::seconds(BEFORE));
    let origin = seconds(to) - seconds(from);
    page.push_str(
        "<h2>The way back</h2><p class=\"legend\"><span class=\"key calls\">arrivals a second</span>\
         <span class=\"key flight\">tasks done a second</span><span class=\"key quota\">the ramp</span></p>\
         <p>From a few seconds before the rung returns. The ramp begins with the first call that is served: a \
         twentieth of the tasks, doubling every 5 s.</p>",
    );
    let late = |t: &Duration| (from..from + crate::seconds(BEFORE + AFTER)).contains(t);
    let plots: Vec<Plot> = shown
        .iter()
        .map(|i| {
            let run = &runs[*i];
            let tasks: Vec<Duration> = run.tasks.iter().map(|t| t.started).filter(late).collect();
            let demand = tasks.len() as f64 / (BEFORE + AFTER);
            let mut curve = Vec::new();
            if let Some(good) = run.first_good() {
                let good_x = origin + seconds(good.saturating_sub(to));
                curve.push((good_x, 0.0));
                for half in 0..=80u32 {
                    let since = Duration::from_millis(500) * half;
                    curve.push((good_x + seconds(since), ramp(since) * demand));
                }
                curve.push((BEFORE + AFTER, demand));
            }
            let arrivals: Vec<Duration> =
                run.faulty_rung().into_iter().flat_map(|r| &r.records).map(|r| r.arrival).collect();
            let line = |instants: &[Duration]| {
                rate(instants.iter().filter(|t| late(t)).map(|t| t.saturating_sub(from)), 1.0)
            };
            let lines = vec![
                Series {
                    name: "arrivals a second".into(),
                    class: "calls".into(),
                    mark: Mark::Steps,
                    points: line(&arrivals),
                },
                Series {
                    name: "tasks done a second".into(),
                    class: "p4".into(),
                    mark: Mark::StepLine,
                    points: line(&run.completions()),
                },
                Series {
                    name: "the ramp".into(),
                    class: "quota".into(),
                    mark: Mark::StepLine,
                    points: curve,
                },
            ];
            let first = run.first_good().map_or("no call was served after the return.".to_string(), |at| {
                format!("the first good reply came {:.1} s after the return.", seconds(at.saturating_sub(to)))
            });
            Plot {
                id: format!("back{i}"),
                title: format!("the way back, {}", run.policy),
                text: format!("{}: {first}", run.policy),
                width: 440.0,
                height: 180.0,
                max_x: BEFORE + AFTER,
                max_y: highest(&lines, 1.0),
                scale: Scale::Linear,
                series: lines,
            }
        })
        .collect();
    side_by_side(page, plots);
}

/// Which rung the calls went to.
pub(super) fn shares(page: &mut String, runs: &[Run], shown: &[usize]) {
    let max_x = shown.iter().map(|i| seconds(runs[*i].elapsed)).fold(0.1, f64::max);
    let step = nice(max_x / 80.0);
    page.push_str("<h2>Share of the calls by rung</h2><p class=\"legend\">");
    for (r, rung) in runs[shown[0]].rungs.iter().enumerate() {
        put!(page, "<span class=\"key r{}\">rung {}</span>", r % 4, escape(&rung.name));
    }
    page.push_str("</p>");
    let plots = shown
        .iter()
        .map(|i| {
            let run = &runs[*i];
            let counts: Vec<Vec<u64>> = run
                .rungs
                .iter()
                .map(|r| series(r.records.iter().map(|c| c.arrival), crate::seconds(step)))
                .collect();
            let bins = counts.iter().map(Vec::len).max().unwrap_or(0);
            let at = |rung: usize, bin: usize| counts[rung].get(bin).copied().unwrap_or(0) as f64;
            let all: Vec<f64> = (0..bins).map(|b| (0..counts.len()).map(|r| at(r, b)).sum()).collect();
            // The last rung in front would hide the others: each area is drawn up to its own sum, from
            // the whole down to the first.
            let lines = (0..counts.len()).rev().map(|rung| {
                let mut points: Vec<(f64, f64)> = (0..bins)
                    .map(|b| {
                        let sum: f64 = (0..=rung).map(|r| at(r, b)).sum();
                        (b as f64 * step, if all[b] > 0.0 { 100.0 * sum / all[b] } else { 0.0 })
                    })
                    .collect();
                points.extend(points.last().map(|(x, y)| (x + step, *y)));
                Series {
                    name: format!("rung {}", run.rungs[rung].name),
                    class: format!("r{}", rung % 4),
                    mark: Mark::Steps,
                    points,
                }
            });
            let calls: Vec<String> =
                run.rungs.iter().map(|r| format!("rung {}: {} calls", r.name, r.stats.wire_calls)).collect();
            Plot {
                id: format!("s{i}"),
                title: format!("percent of the calls by rung, {}", run.policy),
                text: format!("{}: {}.", run.policy, calls.join(", ")),
                width: 440.0,
                height: 120.0,
                max_x,
                max_y: 100.0,
                scale: Scale::Linear,
                series: lines.collect(),
            }
        })
        .collect();
    side_by_side(page, plots);
}

fn side_by_side(page: &mut String, mut plots: Vec<Plot>) {
    let max_y = plots.iter().map(|p| p.max_y).fold(1.0, f64::max);
    put!(page, "<div class=\"grid cols{}\">", plots.len());
    for plot in &mut plots {
        plot.max_y = max_y;
        put!(page, "<figure><figcaption>{}</figcaption>{}</figure>", escape(&plot.title), plot.svg());
    }
    page.push_str("</div>");
}
