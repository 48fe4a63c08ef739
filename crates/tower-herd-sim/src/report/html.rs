//! One self-contained page: figures, plots, and a few words on what one sees.

use std::time::Duration;

use super::Row;
use super::svg::{Mark, Plot, Scale, Series, escape, nice};
use super::table::{EXTRAS, OUTAGE};
use super::{story, time};
use crate::provider::{Outcome, series};
use crate::scenario::Run;

const STYLE: &str = include_str!("style.css");

/// Draws the runs (of one scenario and one seed) and their rows as a page without any outside part.
///
/// The run named `naive`, or else the first, stands for *before*; `tower-herd`, or else the last one
/// that is not the oracle, for *after*. The others are folded away below.
pub fn html(runs: &[Run], rows: &[Row]) -> String {
    let mut page = String::new();
    let scenario = runs.first().map_or("", |r| r.settings.scenario.name());
    put!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>tower-herd: {scenario}</title><style>{STYLE}</style></head><body><main>"
    );
    put!(page, "<h1>{scenario}</h1>");
    if let Some(run) = runs.first() {
        intro(&mut page, run);
    }
    figures(&mut page, rows);
    if runs.is_empty() {
        page.push_str("</main></body></html>\n");
        return page;
    }
    if runs[0].settings.rate.is_some() {
        time::goodput(&mut page, runs);
    } else {
        progress(&mut page, runs);
    }
    let before = runs.iter().position(|r| r.policy == "naive").unwrap_or(0);
    let after = runs
        .iter()
        .position(|r| r.policy == "tower-herd")
        .or_else(|| runs.iter().rposition(|r| r.policy != "oracle"))
        .unwrap_or(runs.len() - 1);
    let mut shown = vec![before];
    if after != before {
        shown.push(after);
    }
    if runs[0].settings.outage_at().is_some() {
        time::comeback(&mut page, runs, &shown);
    }
    panels(&mut page, runs, &shown);
    if runs[0].rungs.len() > 1 {
        time::shares(&mut page, runs, &shown);
    }
    seen(&mut page, runs, before, after);
    let rest: Vec<usize> = (0..runs.len()).filter(|i| !shown.contains(i)).collect();
    if !rest.is_empty() {
        page.push_str("<details><summary>The other policies</summary>");
        for pair in rest.chunks(2) {
            grid(&mut page, runs, pair);
        }
        page.push_str("</details>");
    }
    for run in runs {
        if let Some(about) = &run.about {
            put!(page, "<p class=\"note\"><b>{}</b>: {}</p>", escape(run.policy), escape(about));
        }
    }
    page.push_str("</main></body></html>\n");
    page
}

pub(super) fn seconds(d: Duration) -> f64 {
    d.as_secs_f64()
}

fn intro(page: &mut String, run: &Run) {
    let s = &run.settings;
    if s.ceilings.is_empty() {
        // Somebody else's servers over real sockets.
        put!(
            page,
            "<p>{} agents, {} tasks, {} rung(s) of which nothing is known but what was sent there and what \
             came back. Seed {}.</p>",
            s.agents,
            s.tasks,
            run.rungs.len(),
            run.seed,
        );
        return;
    }
    put!(page, "<p>{} Seed {}. {}</p>", story::told(s), run.seed, story::COUNTED);
}

fn figures(page: &mut String, rows: &[Row]) {
    page.push_str(
        "<div class=\"scroll\"><table><caption>Figures</caption><thead><tr><th scope=\"col\">policy</th>\
         <th scope=\"col\">done</th><th scope=\"col\">lost</th><th scope=\"col\">calls</th>\
         <th scope=\"col\">calls a task</th><th scope=\"col\">429s</th><th scope=\"col\">seconds</th>\
         <th scope=\"col\">oracle</th><th scope=\"col\">early</th><th scope=\"col\">duplicates</th>\
         <th scope=\"col\">peak in 100 ms</th></tr></thead><tbody>",
    );
    let count = |v: Option<u64>| v.map_or("–".to_string(), |v| v.to_string());
    for r in rows {
        let peaks = r
            .peak_100ms
            .as_ref()
            .map_or("–".to_string(), |m| m.values().map(u64::to_string).collect::<Vec<_>>().join(" / "));
        put!(
            page,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td{}>{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{:.1}</td><td>{}</td><td>{}</td><td>{}</td><td>{peaks}</td></tr>",
            escape(&r.policy),
            r.done,
            if r.lost > 0 { " class=\"bad\"" } else { "" },
            r.lost,
            count(r.wire_calls),
            r.amplification.map_or("–".to_string(), |a| format!("{a:.2}")),
            count(r.throttled),
            r.seconds,
            r.oracle_seconds.map_or("–".to_string(), |s| format!("{s:.1}")),
            count(r.early_calls),
            count(r.duplicates),
        );
    }
    page.push_str("</tbody></table></div>");
    for (caption, columns) in [("Beside them", &EXTRAS[..]), ("The outage and its end", &OUTAGE[..])] {
        let shown: Vec<_> =
            columns.iter().filter(|(_, _, figure)| rows.iter().any(|r| figure(r).is_some())).collect();
        if shown.is_empty() {
            continue;
        }
        put!(
            page,
            "<div class=\"scroll\"><table><caption>{caption}</caption><thead><tr>\
             <th scope=\"col\">policy</th>"
        );
        for (name, ..) in &shown {
            put!(page, "<th scope=\"col\">{}</th>", escape(name));
        }
        page.push_str("</tr></thead><tbody>");
        for r in rows {
            put!(page, "<tr><th scope=\"row\">{}</th>", escape(&r.policy));
            for (_, places, figure) in &shown {
                let cell = figure(r).map_or("–".to_string(), |v| format!("{v:.places$}"));
                put!(page, "<td>{cell}</td>");
            }
            page.push_str("</tr>");
        }
        page.push_str("</tbody></table></div>");
    }
    let outage = rows.iter().any(|r| r.recovery.is_some());
    legend(page, &[super::LEGEND, if outage { super::OUTAGE_LEGEND } else { "" }]);
}

/// The legends of the terminal, folded away.
fn legend(page: &mut String, texts: &[&str]) {
    page.push_str("<details><summary>What the columns mean</summary><table class=\"words\"><tbody>");
    for line in texts.iter().flat_map(|text| text.lines()) {
        let (word, meaning) = line.split_once("  ").unwrap_or((line, ""));
        put!(page, "<tr><th scope=\"row\">{}</th><td>{}</td></tr>", escape(word), escape(meaning.trim()));
    }
    page.push_str("</tbody></table></details>");
}

/// Tasks done over time, one line a policy.
fn progress(page: &mut String, runs: &[Run]) {
    let max_x = runs.iter().map(|r| seconds(r.elapsed)).fold(0.1, f64::max);
    let max_y = runs.iter().map(|r| r.settings.tasks as f64).fold(1.0, f64::max);
    let lines = runs.iter().enumerate().map(|(i, run)| {
        let ends: Vec<f64> =
            run.tasks.iter().filter(|t| t.lost.is_none()).map(|t| seconds(t.ended)).collect();
        let every = (ends.len() / 200).max(1);
        let mut points = vec![(0.0, 0.0)];
        points.extend(
            ends.iter().enumerate().filter(|(n, _)| n % every == 0).map(|(n, t)| (*t, n as f64 + 1.0)),
        );
        if let Some(last) = ends.last() {
            points.push((*last, ends.len() as f64));
        }
        Series { name: run.policy.into(), class: format!("p{}", i % 8), mark: Mark::Line, points }
    });
    let plot = Plot {
        id: "done".into(),
        title: "Tasks done over time".into(),
        text: runs
            .iter()
            .map(|r| {
                format!(
                    "{}: {} of {} after {:.1} s.",
                    r.policy,
                    r.done(),
                    r.settings.tasks,
                    seconds(r.elapsed)
                )
            })
            .collect::<Vec<_>>()
            .join(" "),
        width: 900.0,
        height: 260.0,
        max_x,
        max_y,
        scale: Scale::Linear,
        series: lines.collect(),
    };
    page.push_str("<h2>Tasks done over time</h2><p class=\"legend\">");
    for (i, run) in runs.iter().enumerate() {
        put!(page, "<span class=\"key p{}\">{}</span>", i % 8, escape(run.policy));
    }
    put!(
        page,
        "</p><figure>{}<figcaption>A dot marks the end of a run: a line that ends low has lost its tasks. The oracle knows every limit \
         and shows what is possible.</figcaption></figure>",
        plot.svg()
    );
}

fn panels(page: &mut String, runs: &[Run], shown: &[usize]) {
    page.push_str(
        "<h2>What each rung saw</h2>\
         <p class=\"legend\"><span class=\"key calls\">arrivals a second</span>\
         <span class=\"key broken\">of them failed</span>\
         <span class=\"key refused\">of them refused with 429</span>\
         <span class=\"key flight\">in flight</span><span class=\"key quota\">ceiling</span></p>\
         <p>Arrivals are on a logarithmic scale, the same for both columns: a herd shows as a red wall, \
         fleet control as a blue band with few red specks.</p>",
    );
    grid(page, runs, shown);
}

/// A few words on what one sees, from the figures themselves.
fn seen(page: &mut String, runs: &[Run], before: usize, after: usize) {
    for (word, run) in [("Before", &runs[before]), ("After", &runs[after])] {
        let s = run.stats();
        let ceiling = run.settings.ceilings.iter().sum::<u32>();
        put!(
            page,
            "<p><b>{word} ({}):</b> {} of {} tasks done in {:.1} s, with {} calls, {} of them refused. \
             The busiest 100 ms at one rung brought {} arrivals",
            run.policy,
            run.done(),
            run.settings.tasks,
            seconds(run.elapsed),
            s.wire_calls,
            s.throttled,
            s.peak_100ms,
        );
        if run.settings.ceilings.is_empty() {
            page.push_str(".</p>");
        } else if s.failed + s.unreachable > 0 {
            put!(page, "; {} calls failed.</p>", s.failed + s.unreachable);
        } else {
            put!(
                page,
                ", against {ceiling} places in all; {} calls came before an instant their process had been \
                 told.</p>",
                s.early_calls,
            );
        }
        if before == after {
            break;
        }
    }
}

/// One column a run; for each rung its arrivals and what was in flight, on common scales.
fn grid(page: &mut String, runs: &[Run], shown: &[usize]) {
    let rungs = runs[shown[0]].rungs.len();
    let max_x = shown.iter().map(|i| seconds(runs[*i].elapsed)).fold(0.1, f64::max);
    let step = nice(max_x / 160.0);
    put!(page, "<div class=\"grid cols{}\">", shown.len());
    for i in shown {
        put!(page, "<h3>{}</h3>", escape(runs[*i].policy));
    }
    for rung in 0..rungs {
        let arrivals: Vec<Plot> = shown.iter().map(|i| arrivals(&runs[*i], *i, rung, max_x, step)).collect();
        let flights: Vec<Plot> = shown.iter().map(|i| flights(&runs[*i], *i, rung, max_x, step)).collect();
        for mut row in [arrivals, flights] {
            let max_y = row.iter().map(|p| p.max_y).fold(1.0, f64::max);
            for plot in &mut row {
                plot.max_y = max_y;
                put!(page, "<figure><figcaption>{}</figcaption>{}</figure>", escape(&plot.title), plot.svg());
            }
        }
    }
    page.push_str("</div>");
}

pub(super) fn arrivals(run: &Run, index: usize, rung: usize, max_x: f64, step: f64) -> Plot {
    let r = &run.rungs[rung];
    let bin = crate::seconds(step);
    let points = |wanted: fn(Outcome) -> bool| {
        let times = r.records.iter().filter(|c| wanted(c.outcome)).map(|c| c.arrival);
        let mut points: Vec<(f64, f64)> =
            series(times, bin).iter().enumerate().map(|(i, n)| (i as f64 * step, *n as f64 / step)).collect();
        if !points.is_empty() {
            points.push((points.len() as f64 * step, 0.0));
        }
        points
    };
    let all = points(|_| true);
    let max_y = all.iter().map(|p| p.1).fold(10.0, f64::max);
    let s = &r.stats;
    Plot {
        id: format!("a{index}-{rung}"),
        title: format!("rung {}: arrivals a second, {}", r.name, run.policy),
        text: format!(
            "{} calls arrived, {} of them were refused; at most {} in 100 ms.",
            s.wire_calls, s.throttled, s.peak_100ms
        ),
        width: 440.0,
        height: 140.0,
        max_x,
        max_y,
        scale: Scale::Log,
        series: vec![
            Series {
                name: "arrivals a second".into(),
                class: "calls".into(),
                mark: Mark::Steps,
                points: all,
            },
            Series {
                name: "failures a second".into(),
                class: "broken".into(),
                mark: Mark::Steps,
                points: points(|o| matches!(o, Outcome::Failed | Outcome::Unreachable)),
            },
            Series {
                name: "429s a second".into(),
                class: "refused".into(),
                mark: Mark::Steps,
                points: points(|o| o == Outcome::Throttled),
            },
        ],
    }
}

fn flights(run: &Run, index: usize, rung: usize, max_x: f64, step: f64) -> Plot {
    let r = &run.rungs[rung];
    let points = binned(&r.in_flight, step);
    let mut quota: Vec<(f64, f64)> = r.ceiling.iter().map(|(t, c)| (seconds(*t), f64::from(*c))).collect();
    if let Some(last) = quota.last().copied() {
        quota.push((max_x, last.1));
    }
    // A ceiling nobody comes near would flatten everything else.
    let peak = points.iter().map(|p| p.1).fold(1.0, f64::max);
    quota.retain(|q| q.1 <= peak * 4.0);
    let max_y = points.iter().chain(&quota).map(|p| p.1).fold(1.0, f64::max) * 1.05;
    Plot {
        id: format!("f{index}-{rung}"),
        title: format!("rung {}: in flight and ceiling, {}", r.name, run.policy),
        text: format!("At most {} calls were served at the same time.", r.stats.in_flight_peak),
        width: 440.0,
        height: 120.0,
        max_x,
        max_y,
        scale: Scale::Linear,
        series: vec![
            Series { name: "in flight".into(), class: "flight".into(), mark: Mark::Steps, points },
            Series { name: "ceiling".into(), class: "quota".into(), mark: Mark::StepLine, points: quota },
        ],
    }
}

/// The largest level in each step of time.
fn binned(levels: &[(Duration, u64)], step: f64) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    let mut level = 0u64;
    for (at, now) in levels {
        let bin = (seconds(*at) / step).floor();
        while (points.len() as f64) <= bin {
            points.push((points.len() as f64 * step, level as f64));
        }
        if let Some(last) = points.last_mut() {
            last.1 = last.1.max(*now as f64);
        }
        level = *now;
    }
    if !points.is_empty() {
        points.push((points.len() as f64 * step, level as f64));
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Chain, Oracle};
    use crate::scenario::{Scenario, Settings, run};

    #[test]
    fn the_page_is_self_contained_and_well_formed() {
        let mut settings = Settings::new(Scenario::Stampede);
        settings.set("tasks", "800").unwrap();
        let runs = [
            run(&settings, &Chain::naive(), 1).unwrap(),
            run(&settings, &Chain::jitter(), 1).unwrap(),
            run(&settings, &Oracle, 1).unwrap(),
        ];
        let rows: Vec<Row> = runs.iter().map(|r| r.row(Some(9.0))).collect();
        let page = html(&runs, &rows);
        for word in ["http://", "https://", "src=", "<script", "<link", "@import", "url("] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(page.contains("prefers-color-scheme: dark"));
        for tag in ["svg", "figure", "table", "div", "details", "title", "path", "main", "body", "html"] {
            let open = page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
            assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        // Every plot has a title and a description of its own.
        let plots = page.matches("<svg").count();
        assert_eq!(plots, 1 + 3 * 2 * 3 + 2);
        assert_eq!(page.matches("<desc").count(), plots);
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }

    /// Every scenario has a page, and every page stands alone.
    #[test]
    fn all_scenarios_draw() {
        for (scenario, pairs, titles) in [
            (
                Scenario::Brownout,
                &["duration=20", "ceilings=100,40"][..],
                &["Goodput", "Share of the calls"][..],
            ),
            (Scenario::Recovery, &["duration=40", "outage=10..20"], &["Goodput", "The way back"]),
            (Scenario::Amplification, &["duration=5", "deadline=5"], &["Goodput", "What each rung saw"]),
            (Scenario::Cron, &["agents=100", "processes=10", "duration=120"], &["Tasks done over time"]),
            (Scenario::EqualHint, &["agents=50"], &["Tasks done over time"]),
        ] {
            let mut settings = Settings::new(scenario);
            for pair in pairs {
                settings.set_pair(pair).unwrap();
            }
            let runs = [
                run(&settings, &Chain::naive(), 1).unwrap(),
                run(&settings, &Chain::jitter(), 1).unwrap(),
                run(&settings, &Oracle, 1).unwrap(),
            ];
            let rows: Vec<Row> = runs.iter().map(|r| r.row_beside(&runs[2])).collect();
            let page = html(&runs, &rows);
            for title in titles {
                assert!(page.contains(title), "{}: {title}", scenario.name());
            }
            for tag in ["svg", "figure", "table", "div", "details", "title", "path", "p", "main", "html"] {
                let open =
                    page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
                assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{} {tag}", scenario.name());
            }
            assert_eq!(page.matches("<desc").count(), page.matches("<svg").count());
            for word in ["http://", "https://", "src=", "<script", "url(", "NaN", "inf,", ">inf<"] {
                assert!(!page.contains(word), "{}: {word}", scenario.name());
            }
            let mut ids: Vec<&str> =
                page.split("<title id=\"").skip(1).filter_map(|t| t.split('"').next()).collect();
            let all = ids.len();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), all, "{}: ids are unique", scenario.name());
        }
    }

    #[test]
    fn levels_are_binned_by_their_maximum() {
        let at = Duration::from_millis;
        let levels = [(at(0), 1), (at(100), 5), (at(200), 2), (at(2500), 3)];
        assert_eq!(binned(&levels, 1.0), [(0.0, 5.0), (1.0, 2.0), (2.0, 3.0), (3.0, 3.0)]);
    }
}
