//! One run: the provider, the members, what befalls them, and the judgement.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::{
    members::{Launch, Life, Member},
    options::{CONTINUE_AT, EMPTY_AT, KILL_AT, Options, STOP_AT},
    provider::{Books, Counts, LONGEST, Provider},
    screen::Screen,
    server::{self, Server},
    worker::{Orders, TTL},
};

/// The most calls that one member wants to make at a time.
const AGENTS: u32 = 6;
/// How often everything is looked at.
const TICK: Duration = Duration::from_millis(100);

/// How it went.
#[derive(Debug)]
pub struct Report {
    /// What the provider counted.
    pub counts: Counts,
    /// Answered calls, as the members count them, and others.
    pub done: u64,
    pub failed: u64,
    /// Calls to the store, by a second and process; of those that ran to the end.
    pub lease_calls: f64,
    /// The part of the ceiling that was in use, from when the first call came.
    pub used: f64,
    /// The most by which the ceiling may have been exceeded without a breach, at some time.
    pub allowed: u32,
    /// It was stopped before its time.
    pub stopped: bool,
}

impl Report {
    /// The ceiling held where it must.
    pub fn held(&self) -> bool {
        self.counts.excess == 0
    }
}

/// Runs until its time is over, or until `stop`.
pub async fn run(
    options: &Options,
    launch: &Launch,
    mut server: Option<Server>,
    screen: &Screen,
    stop: impl Future<Output = ()>,
) -> Result<Report, String> {
    let many = options.processes as usize;
    let provider =
        Provider::start(options.ceiling, many, options.seed).map_err(|e| format!("no provider ({e})"))?;
    // A name of its own: on a server of the reader's there may be others.
    let name = format!("fleet-example-{}-{}", std::process::id(), options.seed);
    let mut members = Vec::new();
    for number in 0..many {
        let orders = Orders {
            number,
            url: provider.url.clone(),
            name: name.clone(),
            ceiling: options.ceiling,
            agents: AGENTS.max(options.ceiling.div_ceil(options.processes).saturating_mul(2)),
            seed: options.seed.wrapping_mul(1000).wrapping_add(number as u64),
            redis: server.as_ref().map(Server::url),
        };
        members.push(launch.start(orders).await?);
    }
    let mut story = Story {
        options,
        screen,
        books: provider.books(),
        began: Instant::now(),
        next: Some(Step::Kill),
        allowed: 0,
        lacking: None,
    };
    let mut use_of_slots = Use::default();
    let stopped = {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut stop = std::pin::pin!(stop);
        let mut whole = 0;
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break true,
                _ = ticks.tick() => {}
            }
            let at = story.began.elapsed();
            if at >= Duration::from_secs(options.seconds) {
                break false;
            }
            if options.chaos {
                story.strike(at, &mut members, server.as_mut()).await?;
            }
            story.watch(at, &members);
            let counts = provider.books().read();
            use_of_slots.add(&counts);
            let is_whole = at.as_secs() > whole;
            whole = at.as_secs();
            screen.show(at, is_whole, &counts, &members);
            if let Some(why) = members.iter().find_map(|member| match member.seen().0 {
                Life::Ended(why) => Some(why),
                _ => None,
            }) {
                return Err(format!("a worker is gone: {why}"));
            }
        }
    };
    screen.end();
    // Judged before they end: a slot that is given back with a call still on its way is no breach of a running fleet.
    let counts = provider.books().read();
    let seen: Vec<_> = members.iter().map(Member::seen).collect();
    let seconds = story.began.elapsed().as_secs_f64();
    for member in members {
        member.end().await;
    }
    let live = || seen.iter().filter(|(life, _)| *life == Life::Runs).map(|(_, status)| status);
    Ok(Report {
        counts,
        done: seen.iter().map(|(_, status)| status.done).sum(),
        failed: seen.iter().map(|(_, status)| status.failed).sum(),
        lease_calls: live().map(|status| status.exchanges as f64).sum::<f64>()
            / live().count().max(1) as f64
            / seconds,
        used: use_of_slots.mean(),
        allowed: story.allowed,
        stopped,
    })
}

/// How much of the ceiling is in use, from the first call on.
#[derive(Default)]
struct Use {
    sum: f64,
    looks: u32,
}

impl Use {
    fn add(&mut self, counts: &Counts) {
        if counts.calls > 0 {
            self.sum += f64::from(counts.now) / f64::from(counts.ceiling);
            self.looks += 1;
        }
    }

    fn mean(&self) -> f64 {
        if self.looks == 0 { 0.0 } else { self.sum / f64::from(self.looks) }
    }
}

/// What befalls the fleet, one thing after the other.
#[derive(Clone, Copy)]
enum Step {
    Kill,
    Stop,
    Continue,
    Settle,
    Empty,
}

struct Story<'a> {
    options: &'a Options,
    screen: &'a Screen,
    books: &'a Books,
    began: Instant,
    next: Option<Step>,
    allowed: u32,
    /// Slots are missing since then, for this reason.
    lacking: Option<(Duration, &'static str)>,
}

/// Who is killed, and who is stopped.
const KILLED: usize = 0;
const STOPPED: usize = 1;

impl Story<'_> {
    /// Does what is due.
    async fn strike(
        &mut self,
        at: Duration,
        members: &mut [Member],
        server: Option<&mut Server>,
    ) -> Result<(), String> {
        let Some(step) = self.next else { return Ok(()) };
        let due = match step {
            Step::Kill => KILL_AT,
            Step::Stop => STOP_AT,
            Step::Continue => CONTINUE_AT,
            Step::Settle => CONTINUE_AT + LONGEST * 2,
            Step::Empty => EMPTY_AT,
        };
        if at < due {
            return Ok(());
        }
        self.next = match step {
            Step::Kill => {
                let held = members[KILLED].seen().1.slots;
                members[KILLED].kill().await?;
                self.say(at, &format!("worker {} is killed (SIGKILL), with {held} slots", KILLED + 1));
                self.lacking = Some((at, "the slots of the killed process are in use again"));
                Some(Step::Stop)
            }
            Step::Stop => {
                members[STOPPED].stop()?;
                let held = members[STOPPED].seen().1.slots.max(self.books.read().by_worker[STOPPED]);
                // Calls in flight run on, and others may stand between the check of the lease and the socket.
                self.allowed = held;
                self.books.allow(held);
                let time = CONTINUE_AT.saturating_sub(STOP_AT).as_secs();
                self.say(
                    at,
                    &format!(
                        "worker {} is stopped (SIGSTOP) for {time} s, with {held} slots; its lease lasts {} s",
                        STOPPED + 1,
                        TTL.as_secs()
                    ),
                );
                Some(Step::Continue)
            }
            Step::Continue => {
                members[STOPPED].go_on()?;
                self.say(at, &format!("worker {} goes on (SIGCONT)", STOPPED + 1));
                Some(Step::Settle)
            }
            Step::Settle => {
                self.books.allow(0);
                Some(Step::Empty)
            }
            Step::Empty => {
                self.empty(at, server).await?;
                None
            }
        };
        Ok(())
    }

    async fn empty(&mut self, at: Duration, server: Option<&mut Server>) -> Result<(), String> {
        match server {
            Some(Server::Own(own)) => {
                own.restart_empty().await?;
                self.say(at, "Redis is killed and restarted, empty");
            }
            Some(Server::Theirs(url)) if self.options.flush => {
                server::ask(url, "FLUSHALL").await.map_err(|e| format!("FLUSHALL failed: {e}"))?;
                self.say(at, "FLUSHALL: Redis has forgotten everything");
            }
            _ => {
                self.say(
                    at,
                    "Redis is yours, and is left alone (--flush empties it; --redis own restarts it)",
                );
                return Ok(());
            }
        }
        self.lacking = Some((at, "the whole ceiling is held again"));
        Ok(())
    }

    /// Tells when all slots are held again.
    fn watch(&mut self, at: Duration, members: &[Member]) {
        let Some((since, what)) = self.lacking else { return };
        let seen = members.iter().map(Member::seen).filter(|(life, _)| *life == Life::Runs);
        let (slots, learns) = seen.fold((0, false), |(slots, learns), (_, status)| {
            (slots + status.slots, learns || !status.lease.is_empty())
        });
        // Not before the loss can have been noticed.
        if at >= since + Duration::from_secs(1) && slots >= self.options.ceiling && !learns {
            self.say(at, &format!("{what}, after {:.1} s", at.saturating_sub(since).as_secs_f64()));
            self.lacking = None;
        }
    }

    fn say(&self, at: Duration, what: &str) {
        self.screen.say(at, what);
    }
}
