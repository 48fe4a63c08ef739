//! The table: it redraws itself on a terminal; elsewhere there is a line a second.

use std::{io::IsTerminal as _, io::Write as _, time::Duration};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    members::{Life, Member},
    provider::Counts,
};

/// Where it is shown: on stdout.
pub struct Screen {
    bars: Option<(MultiProgress, ProgressBar, Vec<ProgressBar>)>,
    quiet: bool,
}

impl Screen {
    /// With a line for each member. `quiet`: nothing at all, for tests.
    pub fn new(members: usize, quiet: bool) -> Self {
        if quiet || !std::io::stdout().is_terminal() {
            return Screen { bars: None, quiet };
        }
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stdout_with_hz(10));
        let line = |prefix: String| {
            let bar = all.add(ProgressBar::new_spinner());
            let style = ProgressStyle::with_template("{prefix:10} {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.set_prefix(prefix);
            bar
        };
        let top = line("provider".into());
        let lines = (1..=members).map(|number| line(format!("worker {number}"))).collect();
        Screen { bars: Some((all, top, lines)), quiet }
    }

    /// Something has happened.
    pub fn say(&self, at: Duration, what: &str) {
        let line = format!("{:5.1} s  {what}", at.as_secs_f64());
        match &self.bars {
            Some((all, ..)) => all.println(line).unwrap_or_default(),
            None => self.print(&line),
        }
    }

    /// How it stands. `whole`: a second is over.
    pub fn show(&self, at: Duration, whole: bool, counts: &Counts, members: &[Member]) {
        let seen: Vec<_> = members.iter().map(Member::seen).collect();
        let Some((_, top, lines)) = &self.bars else {
            if whole {
                let column = |of: &dyn Fn(&crate::worker::Status) -> String| {
                    let each = seen.iter().map(|(life, status)| match life {
                        Life::Runs => of(status),
                        Life::Stopped => "stop".into(),
                        Life::Killed | Life::Ended(_) => "-".into(),
                    });
                    each.map(|text| format!("{text:>5}")).collect::<String>()
                };
                self.print(&format!(
                    "{:5.1} s  provider {:>3} of {} in flight, peak {:>3} | slots{} | in flight{} | waiting{}",
                    at.as_secs_f64(),
                    counts.now,
                    counts.ceiling,
                    counts.peak,
                    column(&|status| status.slots.to_string()),
                    column(&|status| status.in_flight.to_string()),
                    column(&|status| status.waiting.to_string()),
                ));
            }
            return;
        };
        top.set_message(format!(
            "{:4.1} s  {:>3} of {} in flight, peak {}, {} calls, {} refused",
            at.as_secs_f64(),
            counts.now,
            counts.ceiling,
            counts.peak,
            counts.calls,
            counts.refused
        ));
        for (line, (life, status)) in lines.iter().zip(seen) {
            line.set_message(match life {
                Life::Killed => "killed".to_owned(),
                Life::Ended(why) => why,
                Life::Stopped => format!("{:>3} slots when it was stopped", status.slots),
                Life::Runs => format!(
                    "{:>3} slots {:<16} {:>3} in flight {:>3} waiting  {:>5} done  ceiling {}  {}",
                    status.slots,
                    "#".repeat(status.slots.min(16) as usize),
                    status.in_flight,
                    status.waiting,
                    status.done,
                    status.ceiling,
                    status.lease
                ),
            });
        }
    }

    /// The table is over.
    pub fn end(&self) {
        if let Some((_, top, lines)) = &self.bars {
            // It stays as it was.
            std::iter::once(top).chain(lines).for_each(ProgressBar::abandon);
        }
    }

    /// A line of text, where nobody may be listening any more (`| head`).
    pub fn print(&self, line: &str) {
        if !self.quiet {
            writeln!(std::io::stdout(), "{line}").ok();
        }
    }
}
