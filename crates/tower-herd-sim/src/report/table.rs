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

/// What the columns of [`table`], [`rungs`] and [`summary`] mean, where their names are short.
pub const LEGEND: &str = "\
x task       calls for each task that made one
oracle       seconds of a policy that knows every limit; ratio: against it, where nothing was lost
early        calls before an instant that their process had been told (Retry-After)
dup          executions of a task beyond its first
peak/100ms   most arrivals in any 100 ms; in flight: most calls served at one time; both by rung
no conn      refused connections; peak/s: most arrivals in any second
after pause  most arrivals in any 100 ms of the 2 s after the end of a told wait
return       the same since the first told wait of any caller ended
probes       calls during a pause of more than five minutes";

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

/// Mean and largest of the figures of several seeds, one line a policy.
pub fn summary(rows: &[Row]) -> String {
    let head =
        ["policy", "seeds", "lost", "x task", "", "429s", "", "ratio", "", "early", "dup", "peak/100ms"];
    let sub = ["", "", "max", "mean", "max", "mean", "max", "mean", "max", "max", "max", "max"];
    let mut cells = vec![head.map(String::from).to_vec(), sub.map(String::from).to_vec()];
    let mut names: Vec<&str> = Vec::new();
    for r in rows {
        if !names.contains(&r.policy.as_str()) {
            names.push(&r.policy);
        }
    }
    for name in names {
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
    use crate::policy::{Chain, Oracle};
    use crate::scenario::{Scenario, Settings, run};

    #[test]
    fn tables_fit_a_hundred_columns() {
        let mut settings = Settings::new(Scenario::Stampede);
        settings.set("tasks", "600").unwrap();
        let runs = [run(&settings, &Chain::naive(), 1).unwrap(), run(&settings, &Oracle, 1).unwrap()];
        let rows: Vec<Row> = runs.iter().map(|r| r.row(Some(1234.5))).collect();
        for text in [table(&rows), rungs(&runs), summary(&rows)] {
            let legend = LEGEND.lines();
            assert!(text.lines().chain(legend).all(|l| l.chars().count() <= 100), "{text}");
            assert!(text.contains("naive") && text.contains("oracle"));
        }
    }
}
