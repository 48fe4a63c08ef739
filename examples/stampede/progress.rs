//! What there is to see while a run is going on: on stderr, and only if that is a terminal.

use std::{
    io::IsTerminal,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tower_herd_sim::scenario::Settings;

use crate::drive::{Finished, Live, Policy};

/// Shows one policy: a bar of tasks, and a line for each rung.
pub struct Progress {
    screen: MultiProgress,
    total: ProgressBar,
    rungs: Vec<ProgressBar>,
    plain: bool,
}

impl Progress {
    /// Starts to show a policy. Without a terminal it says in one line what runs, or nothing if `quiet`.
    pub fn begin(policy: Policy, settings: &Settings, rungs: usize, quiet: bool) -> Self {
        let plain = !std::io::stderr().is_terminal();
        if plain && !quiet {
            eprintln!("{}: {} agents, {} tasks ...", policy.name(), settings.agents, settings.tasks);
        }
        let screen = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        let total = screen.add(ProgressBar::new(settings.tasks));
        let style = "{prefix:10} [{bar:40}] {pos}/{len} tasks  {elapsed}  {msg}";
        total.set_style(style_of(style).progress_chars("=> "));
        total.set_prefix(policy.name());
        let line = |at: usize| {
            let bar = screen.add(ProgressBar::new_spinner());
            bar.set_style(style_of("  {prefix:8} {msg}"));
            bar.set_prefix(format!("rung {}", at + 1));
            bar
        };
        let rungs = (0..rungs).map(line).collect();
        Progress { screen, total, rungs, plain: plain && !quiet }
    }

    /// Follows a run until it is over.
    pub fn watch(&self, live: &Arc<Live>) {
        let (live, total, rungs): (Weak<Live>, _, _) =
            (Arc::downgrade(live), self.total.clone(), self.rungs.clone());
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(Duration::from_millis(100));
            loop {
                tick.tick().await;
                let Some(live) = live.upgrade() else { return };
                show(&live, &total, &rungs);
            }
        });
    }

    /// Says how it went, without a screen; the screen is cleared for the table.
    pub fn end(self, finished: &Finished) {
        self.screen.clear().ok();
        if self.plain {
            let row = &finished.row;
            eprintln!("{}: {} done, {} lost after {:.1} s", row.policy, row.done, row.lost, row.seconds);
        }
    }
}

fn style_of(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn show(live: &Live, total: &ProgressBar, rungs: &[ProgressBar]) {
    let (done, lost) = (live.done.load(Relaxed), live.lost.load(Relaxed));
    total.set_position(done + lost);
    if lost > 0 {
        total.set_message(format!("{lost} LOST"));
    }
    for (at, (bar, page)) in rungs.iter().zip(live.book.pages()).enumerate() {
        let (sent, throttled) = (page.sent.load(Relaxed), page.throttled.load(Relaxed));
        let state = match live.providers.get(at) {
            None => format!("{:>3} in flight", page.in_flight.load(Relaxed)),
            Some(p) => {
                let paused = p.paused_until().map_or(String::new(), |(until, _)| {
                    let left = until.saturating_duration_since(tokio::time::Instant::now());
                    format!("  paused {:.1} s", left.as_secs_f64())
                });
                format!(
                    "{:>3} of {:>3} slots, {:>3} waiting{paused}",
                    p.in_flight(),
                    p.ceiling(),
                    p.waiting()
                )
            }
        };
        bar.set_message(format!("{sent:>6} calls  {throttled:>6} 429s  {state}"));
    }
}
