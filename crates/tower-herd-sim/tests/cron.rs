//! The bars of `cron`: what the retries of jobs do to a dependency that is down, with each fix.

use std::time::Duration;
use tower_herd_sim::scenario::cron::{Figures, Fix, Jobs, play, table};

fn seeds() -> std::ops::Range<u64> {
    if std::env::var_os("TOWER_HERD_LONG").is_some() { 0..400 } else { 0..40 }
}

/// The figures of all seeds.
fn all(fix: Fix, jobs: Jobs) -> Vec<Figures> {
    seeds().map(|seed| play(fix, &jobs, seed)).collect()
}

fn one() -> Jobs {
    Jobs { outage: Duration::from_secs(1800), ..Jobs::default() }
}

fn twelve() -> Jobs {
    Jobs { jobs: 12, ..one() }
}

fn median(figures: &[Figures], of: impl Fn(&Figures) -> usize) -> usize {
    let mut values: Vec<usize> = figures.iter().map(of).collect();
    values.sort_unstable();
    values[values.len() / 2]
}

#[track_caller]
fn each(figures: &[Figures], holds: impl Fn(&Figures) -> bool) {
    for (seed, figures) in seeds().zip(figures) {
        assert!(holds(figures), "seed {seed}: {figures:?}");
    }
}

#[test]
fn without_a_fix_three_agents_retry_twelve_times_a_minute_and_jitter_does_not_help() {
    each(&all(Fix::None, one()), |it| it.retries_minute == 12 && it.peak_second == 3 && it.alerts == 0);
    // It spreads the calls inside a second, and there are as many of them.
    let jitter = all(Fix::Jitter, one());
    assert!(median(&jitter, |it| it.retries_minute) >= 12);
    each(&jitter, |it| it.retries_minute >= 9 && it.retries_minute <= 15);
}

#[test]
fn with_the_token_they_retry_four_times_a_minute() {
    each(&all(Fix::Token, one()), |it| it.retries_minute == 4 && it.peak_second == 1);
    each(&all(Fix::JitterToken, one()), |it| it.retries_minute <= 5 && it.peak_second == 1);
}

#[test]
fn with_all_three_one_call_a_second_and_one_alert() {
    let figures = all(Fix::All, one());
    // Five calls open it, and then a probe each ten minutes.
    each(&figures, |it| it.retries_minute <= 4 && it.peak_second <= 1 && it.alerts == 1 && it.calls <= 5 + 3);
    each(&all(Fix::Breaker, one()), |it| it.retries_minute <= 3 && it.alerts == 1 && it.calls <= 6 + 3);
}

// sidekiq/sidekiq#480: jobs that failed together were retried together. The token is one job's: it does nothing for
// many. What protects a dependency from many jobs is its breaker.
#[test]
fn sidekiq_480_many_distinct_jobs_are_not_helped_by_the_token_but_by_the_breaker() {
    each(&all(Fix::None, twelve()), |it| it.retries_minute == 48 && it.peak_second == 12);
    each(&all(Fix::Token, twelve()), |it| it.retries_minute == 48);
    assert!(median(&all(Fix::Jitter, twelve()), |it| it.retries_minute) >= 48);
    assert!(median(&all(Fix::JitterToken, twelve()), |it| it.retries_minute) >= 48);
    for fix in [Fix::Breaker, Fix::All] {
        each(&all(fix, twelve()), |it| it.retries_minute <= 1 && it.alerts == 1);
    }
}

/// All come back: after one longest wait of the queue, after two where one copy of a job may be refused for the sake of
/// another, and with the breaker after its open time.
#[test]
fn after_the_return_all_jobs_are_done() {
    for (fix, seconds) in [
        (Fix::None, 600.0),
        (Fix::Jitter, 780.0),
        (Fix::Token, 1200.0),
        (Fix::JitterToken, 1560.0),
        (Fix::Breaker, 670.0),
        (Fix::All, 670.0),
    ] {
        for jobs in [one(), twelve()] {
            each(&all(fix, jobs), |it| it.drained < seconds);
        }
    }
}

/// The table in the documentation of the layer is this one.
#[test]
fn the_table_of_the_documentation_is_what_is_measured() {
    let docs = include_str!("../../tower-herd/src/retry_token/mod.rs");
    for line in table(1).lines() {
        assert!(docs.contains(&format!("//! {line}\n")), "not in the documentation:\n{}", table(1));
    }
}

#[test]
fn the_same_seed_gives_the_same() {
    assert_eq!(table(7), table(7));
}
