//! A scenario in a few sentences.

use super::html::seconds;
use crate::scenario::{Scenario, Settings};

/// Who counts.
pub(super) const COUNTED: &str = "Everything is counted at the providers.";

/// What happens, for a reader who knows nothing of the settings.
pub(super) fn told(s: &Settings) -> String {
    let mut out = match (s.rate, s.every) {
        (Some(rate), _) => format!(
            "{rate} tasks start a second for {} s, {}, whatever becomes of those before them; each may take {} s. ",
            seconds(s.duration),
            if s.even { "at even distances" } else { "at random instants" },
            seconds(s.deadline),
        ),
        (None, Some(every)) => format!(
            "{} jobs in {} processes start every {} s, {}. ",
            s.agents,
            s.processes,
            seconds(every),
            if s.start_within.is_zero() {
                "all at the same instant".to_string()
            } else {
                format!("within {} s", seconds(s.start_within))
            },
        ),
        // As many tasks as fit into its time.
        (None, None) if s.scenario == Scenario::Fleet => format!(
            "{} agents in {} processes. The {} processes share a ceiling of {} through a store. ",
            s.agents,
            s.processes,
            s.processes,
            s.ceilings.first().copied().unwrap_or_default()
        ),
        (None, None) => format!("{} agents, {} tasks. ", s.agents, s.tasks),
    };
    if s.greedy > 0 {
        put!(out, "The first agent starts {} of them at once, before all others. ", s.greedy);
    }
    if s.stacks > 1 {
        put!(
            out,
            "{} services call each other, each through a stack of its own that may try {} times; the last one \
             calls the provider. ",
            s.stacks,
            s.attempts
        );
    }
    let ceilings: Vec<String> = s.ceilings.iter().map(u32::to_string).collect();
    let hint = s.hint.map_or("no hint".to_string(), |h| format!("Retry-After {} s", seconds(h)));
    put!(
        out,
        "{}: {}; a call lasts {} s on average; a refusal carries {hint}. ",
        if ceilings.len() > 1 { "Ceilings, cheapest rung first" } else { "Ceiling of the provider" },
        ceilings.join(", "),
        seconds(s.latency),
    );
    if let Some(cut) = s.cut_at {
        put!(
            out,
            "At {} s rung {} cuts its quota to {} without notice",
            seconds(s.scaled(cut)),
            s.cut_rung,
            s.cut_to
        );
        match s.returns {
            Some(back) => {
                put!(out, ", and at {} s it is back. ", seconds(s.scaled(back)));
            }
            None => out.push_str(". "),
        }
    }
    let rung = match s.fault_rung {
        0 => "every rung".to_string(),
        n => format!("rung {n}"),
    };
    if let Some((from, to)) = s.outage_at() {
        let kind = if s.outage_connect { "refuses connections" } else { "answers 503" };
        put!(out, "From {} s to {} s {rung} {kind}. ", seconds(from), seconds(to));
    }
    match s.failure {
        0.0 => {}
        1.0 => put!(out, "No call at {rung} succeeds. "),
        p => put!(out, "Of the calls at {rung}, {} % fail. ", (p * 1000.0).round() / 10.0),
    }
    if s.stray > 0.0 {
        put!(out, "Of the calls at {rung}, {} % are answered 429 for no reason. ", s.stray * 100.0);
    }
    if s.scenario == Scenario::EqualHint {
        put!(out, "In the first {} s everything is refused. ", seconds(s.closed));
    }
    out.trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_tells_what_happens() {
        for (scenario, word) in [
            (Scenario::Stampede, "cuts its quota to 20"),
            (Scenario::EqualHint, "everything is refused"),
            (Scenario::Brownout, "20 % fail"),
            (Scenario::Recovery, "From 120 s to 720 s rung 1 refuses connections"),
            (Scenario::Amplification, "3 services call each other"),
            (Scenario::Fleet, "50 processes share a ceiling of 3 through a store"),
            (Scenario::Cron, "1000 jobs in 100 processes start every 60 s, all at the same instant"),
        ] {
            let story = told(&Settings::new(scenario));
            assert!(story.contains(word), "{story}");
        }
    }
}
