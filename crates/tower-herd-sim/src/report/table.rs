//! Tables for a terminal of 100 columns.

use super::Row;
use crate::scenario::Run;

/// Aligns cells: the first column to the left, the others to the right.
fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
            match c {
                0 => line.push_str(&format!("{cell}{pad}")),
                _ => line.push_str(&format!("  {pad}{cell}")),
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |v| v.to_string())
}

fn fixed(value: Option<f64>, places: usize) -> String {
    value.map_or_else(|| "-".into(), |v| format!("{v:.places$}"))
}

fn by_rung(map: Option<&std::collections::BTreeMap<String, u64>>) -> String {
    map.map_or_else(|| "-".into(), |m| m.values().map(u64::to_string).collect::<Vec<_>>().join("/"))
}

/// What the columns of [`table`], [`rungs`], [`extras`] and [`summary`] mean, where their names are short.
pub const LEGEND: &str = "\
x task       calls for each task that made one
oracle       seconds of a policy that knows every limit; ratio: against it, where nothing was lost
early        calls before an instant that their process had been told (Retry-After)
dup          executions of a task beyond its first
peak/100ms   most arrivals in any 100 ms; in flight: most calls served at one time; both by rung
no conn      refused connections; peak/s: most arrivals in any second
after pause  most arrivals in any 100 ms of the 2 s after the end of a told wait
return       the same since the first told wait of any caller ended
probes       calls during a pause of more than five minutes
of called %  tasks done, of those that made a call: the others were refused before they had
wait         longest time from the start of a task to its good end; best: the oracle's
trips        openings of a breaker, as the policy says; alerts: people told";

/// What [`extras`] prints of an outage.
pub const OUTAGE_LEGEND: &str = "\
down         calls at the rung while it was down; share: over the tasks that started meanwhile
probes       of those calls the ones after 10 s; at once: most in flight; /100ms: most arrivals
good         seconds from the return to the end of the first call that was served
t50, t95     from there until that much of what the oracle does in 5 s is done, for 10 s on end
again        openings of a breaker after the return
ahead        share of the tasks that asked since then and were let through, beyond the ramp
over ramp    arrivals of the worst second beyond the share of tasks that started in it";

/// One line a row, under a head.
pub fn table(rows: &[Row]) -> String {
    let head = [
        "policy",
        "done",
        "lost",
        "calls",
        "x task",
        "429s",
        "seconds",
        "oracle",
        "ratio",
        "early",
        "dup",
        "peak/100ms",
        "in flight",
    ];
    let mut cells = vec![head.map(String::from).to_vec()];
    for r in rows {
        cells.push(vec![
            r.policy.clone(),
            r.done.to_string(),
            r.lost.to_string(),
            or_dash(r.wire_calls),
            fixed(r.amplification, 3),
            or_dash(r.throttled),
            format!("{:.1}", r.seconds),
            fixed(r.oracle_seconds, 1),
            fixed(r.against_oracle(), 2),
            or_dash(r.early_calls),
            or_dash(r.duplicates),
            by_rung(r.peak_100ms.as_ref()),
            by_rung(r.in_flight_peak.as_ref()),
        ]);
    }
    align(&cells)
}

/// One line a rung of each run, with what the table has no room for.
pub fn rungs(runs: &[Run]) -> String {
    let head = [
        "policy",
        "rung",
        "calls",
        "served",
        "429s",
        "5xx",
        "no conn",
        "peak/s",
        "after pause",
        "return",
        "probes",
    ];
    let mut cells = vec![head.map(String::from).to_vec()];
    for run in runs {
        for r in &run.rungs {
            let s = &r.stats;
            let figures = [
                s.wire_calls,
                s.served,
                s.throttled,
                s.failed,
                s.unreachable,
                s.peak_1s,
                s.after_pause_100ms,
                s.return_100ms,
                s.probes,
            ];
            let mut line = vec![run.policy.to_string(), r.name.clone()];
            line.extend(figures.map(|f| f.to_string()));
            cells.push(line);
        }
    }
    align(&cells)
}

/// Its name, its places behind the point, and where it stands.
type Figure = (&'static str, usize, fn(&Row) -> Option<f64>);

/// The figures beside the main table.
pub(super) const EXTRAS: [Figure; 9] = [
    ("done %", 2, |r| (r.tasks > 0).then(|| 100.0 * r.done as f64 / r.tasks as f64)),
    ("of called %", 2, |r| r.called.filter(|n| *n > 0).map(|n| 100.0 * r.done as f64 / n as f64)),
    ("wait", 1, |r| r.longest_wait),
    ("best", 1, |r| r.oracle_longest_wait),
    ("first", 1, |r| r.first_wait),
    ("drain", 1, |r| r.drain),
    ("best", 1, |r| r.oracle_drain),
    ("trips", 0, |r| (r.trips + r.alerts > 0).then_some(r.trips as f64)),
    ("alerts", 0, |r| (r.trips + r.alerts > 0).then_some(r.alerts as f64)),
];

/// The figures of an outage.
pub(super) const OUTAGE: [Figure; 11] = [
    ("down", 0, |r| r.recovery.as_ref().map(|r| r.outage_calls as f64)),
    ("share", 3, |r| r.recovery.as_ref()?.outage_share),
    ("probes", 0, |r| r.recovery.as_ref().map(|r| r.probes as f64)),
    ("at once", 0, |r| r.recovery.as_ref().map(|r| r.probes_in_flight as f64)),
    ("/100ms", 0, |r| r.recovery.as_ref().map(|r| r.probes_100ms as f64)),
    ("good", 1, |r| r.recovery.as_ref()?.first_good),
    ("t50", 1, |r| r.recovery.as_ref()?.t50),
    ("t95", 1, |r| r.recovery.as_ref()?.t95),
    ("again", 0, |r| r.recovery.as_ref().map(|r| r.second_trips as f64)),
    ("ahead", 3, |r| r.recovery.as_ref().map(|r| r.ahead)),
    ("over ramp", 0, |r| r.recovery.as_ref().map(|r| r.over_ramp)),
];

/// What the scenario has beside the main table: one line a policy, without the columns that nobody
/// fills. Of several seeds it shows the mean of each figure, and the worst behind a stroke.
pub fn extras(rows: &[Row]) -> String {
    let shown = |all: &'static [Figure]| -> Vec<&'static Figure> {
        all.iter().filter(|(_, _, figure)| rows.iter().any(|r| figure(r).is_some())).collect()
    };
    // An outage has columns enough for a table of its own.
    let tables = [shown(&EXTRAS), shown(&OUTAGE)].into_iter().filter(|columns| !columns.is_empty());
    tables.map(|columns| figures(rows, &columns)).collect::<Vec<_>>().join("\n")
}

fn figures(rows: &[Row], columns: &[&Figure]) -> String {
    let mut cells = vec![vec!["policy".to_string()]];
    cells[0].extend(columns.iter().map(|(name, ..)| (*name).to_string()));
    for name in policies(rows) {
        let mut line = vec![name.to_string()];
        for (column, places, figure) in columns {
            let values: Vec<f64> = rows.iter().filter(|r| r.policy == name).filter_map(figure).collect();
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            // Of what should be much the least is the worst, of everything else the most.
            let worst = match *column {
                "done %" | "of called %" => values.iter().copied().reduce(f64::min),
                _ => values.iter().copied().reduce(f64::max),
            };
            line.push(match (values.len(), worst) {
                (2.., Some(worst)) => format!("{mean:.places$}|{worst:.places$}"),
                _ => fixed(worst, *places),
            });
        }
        cells.push(line);
    }
    align(&cells)
}

fn policies(rows: &[Row]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for r in rows {
        if !names.contains(&r.policy.as_str()) {
            names.push(&r.policy);
        }
    }
    names
}

/// Mean and largest of the figures of several seeds, one line a policy.
pub fn summary(rows: &[Row]) -> String {
    let head =
        ["policy", "seeds", "lost", "x task", "", "429s", "", "ratio", "", "early", "dup", "peak/100ms"];
    let sub = ["", "", "max", "mean", "max", "mean", "max", "mean", "max", "max", "max", "max"];
    let mut cells = vec![head.map(String::from).to_vec(), sub.map(String::from).to_vec()];
    for name in policies(rows) {
        let of: Vec<&Row> = rows.iter().filter(|r| r.policy == name).collect();
        let figures = |f: fn(&Row) -> Option<f64>| {
            let values: Vec<f64> = of.iter().filter_map(|r| f(r)).collect();
            if values.is_empty() {
                return (None, None);
            }
            let most = values.iter().copied().fold(f64::MIN, f64::max);
            (Some(values.iter().sum::<f64>() / values.len() as f64), Some(most))
        };
        let amplification = figures(|r| r.amplification);
        let throttled = figures(|r| r.throttled.map(|n| n as f64));
        let ratio = figures(Row::against_oracle);
        let peak = figures(|r| r.peak_100ms.as_ref().and_then(|m| m.values().max()).map(|n| *n as f64));
        cells.push(vec![
            name.to_string(),
            of.len().to_string(),
            fixed(figures(|r| Some(r.lost as f64)).1, 0),
            fixed(amplification.0, 3),
            fixed(amplification.1, 3),
            fixed(throttled.0, 1),
            fixed(throttled.1, 0),
            fixed(ratio.0, 3),
            fixed(ratio.1, 3),
            fixed(figures(|r| r.early_calls.map(|n| n as f64)).1, 0),
            fixed(figures(|r| r.duplicates.map(|n| n as f64)).1, 0),
            fixed(peak.1, 0),
        ]);
    }
    align(&cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Chain, Consecutive, Oracle};
    use crate::scenario::{Scenario, Settings, run};

    #[test]
    fn tables_fit_a_hundred_columns() {
        let mut settings = Settings::new(Scenario::Stampede);
        settings.set("tasks", "600").unwrap();
        let runs = [run(&settings, &Chain::naive(), 1).unwrap(), run(&settings, &Oracle, 1).unwrap()];
        let rows: Vec<Row> = runs.iter().map(|r| r.row(Some(1234.5))).collect();
        for text in [table(&rows), rungs(&runs), summary(&rows), extras(&rows)] {
            let legend = LEGEND.lines().chain(OUTAGE_LEGEND.lines());
            assert!(text.lines().chain(legend).all(|l| l.chars().count() <= 100), "{text}");
            assert!(text.contains("naive") && text.contains("oracle"));
        }
    }

    #[test]
    fn a_scenario_shows_what_it_has_and_no_more() {
        let mut settings = Settings::new(Scenario::Recovery);
        for pair in ["duration=60", "outage=10..20"] {
            settings.set_pair(pair).unwrap();
        }
        let oracle = run(&settings, &Oracle, 1).unwrap();
        let row = |seed| run(&settings, &Consecutive, seed).unwrap().row_beside(&oracle);
        let (one, two) = (extras(&[row(1)]), extras(&[row(1), row(2)]));
        for text in [&one, &two] {
            assert!(
                text.contains("trips") && text.contains("over ramp") && !text.contains("drain"),
                "{text}"
            );
            assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
            // A head and a line, twice.
            assert_eq!(text.lines().filter(|l| !l.is_empty()).count(), 4);
        }
        assert!(!one.contains('|') && two.contains('|'), "{two}");
    }
}
