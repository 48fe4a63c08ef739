//! A task that no rung could take at once: in the queues of several rungs, served by whichever frees
//! first.

use super::{
    patience::{Step, step},
    service::Ladder,
};
use crate::{
    Clock, Key, Provider, Refusal, RefusalKind, Time,
    gate::{Claimed, Entry},
    observe::Event,
    provider::{Core, Left, Rest, Slot, WaitFor},
};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep};

pub(super) struct Waiting {
    key: Key,
    wait: WaitFor,
    clock: Clock,
    /// Rungs that this walk will not ask (again).
    done: u64,
    places: Vec<Place>,
    /// Rungs with a place, one bit each.
    joined: u64,
    /// When the next tier is joined; none if there is no further one.
    next_tier: Option<Time>,
    /// The rungs of the tier that was joined last, one bit each, and when.
    tier: u64,
    since: Time,
    /// Until it was looked at again whether to stay, where others' queues count: those of other processes are
    /// heard of only now and then.
    look: Option<Duration>,
    sleep: Pin<Box<Sleep>>,
}

/// The least time before a rung is asked again whose layers refused; doubles with each refusal in a row.
const SOON: Duration = Duration::from_millis(1);

/// Where the line is also that of other processes, it is looked at again after this time, and twice as long after.
const LOOK: Duration = Duration::from_millis(50);

struct Place {
    rung: usize,
    /// A layer of the rung said no until then, although a slot was free.
    not_before: Time,
    /// How often in a row: who is wrong about its instants is asked ever more rarely.
    refusals: u32,
    /// None: not in the queue now, for a pause of its scope or the above.
    entry: Option<Entry<Arc<Core>>>,
    /// Among those who wait for the end of its scope's pause.
    rest: Option<Rest>,
}

impl<S, Req> Ladder<S, Req> {
    /// The refusal of a keyed write that may have taken effect at nobody knows which rung.
    pub(super) fn lost(&self) -> Refusal {
        let why = "it may have taken effect, and nothing tells at which rung; give it a task";
        self.refuse(RefusalKind::Exhausted, why, None)
    }

    fn refuse(&self, kind: RefusalKind, why: &'static str, at: Option<Instant>) -> Refusal {
        self.rungs[0].provider.observe(|| Event::Refused { provider: self.name(), scope: None, kind });
        Refusal::new(kind, why, self.name().clone(), at)
    }
}

impl Waiting {
    pub(super) fn begin<S, Req>(ladder: &Ladder<S, Req>, key: Key, done: u64, wait: WaitFor) -> Self {
        let clock = ladder.rungs[0].provider.clock();
        Waiting {
            key,
            wait,
            clock,
            done,
            places: Vec::new(),
            joined: 0,
            next_tier: Some(Time::ZERO),
            tier: 0,
            since: Time::ZERO,
            look: None,
            sleep: Box::pin(tokio::time::sleep_until(clock.instant(wait.until))),
        }
    }

    /// The rung was called in this walk: it is not asked again.
    pub(super) fn exclude(&mut self, rung: usize) {
        self.bar(1 << rung);
    }

    /// These rungs, a bit each, are not asked in this walk (any more).
    pub(super) fn bar(&mut self, rungs: u64) {
        self.done |= rungs;
        self.places.retain(|place| rungs & (1 << place.rung) == 0);
    }

    /// A layer of the rung refused the call until `at` (none: its own queue knows): it is asked again then,
    /// and at least a little later, or a layer that is wrong about its instants would spin us.
    pub(super) fn hold_off(&mut self, rung: usize, at: Option<Time>) {
        self.joined |= 1 << rung;
        let place = match self.places.iter().position(|place| place.rung == rung) {
            Some(i) => &mut self.places[i],
            None => {
                self.places.push(Place::new(rung));
                self.places.last_mut().expect("just pushed")
            }
        };
        let soon = SOON.saturating_mul(1 << place.refusals.min(8));
        place.refusals = place.refusals.saturating_add(1);
        place.not_before = self.clock.now().saturating_add(soon).max(at.unwrap_or_default());
    }

    /// The rungs that are not to be asked yet, one bit each.
    pub(super) fn held_off(&self) -> u64 {
        let now = self.clock.now();
        let places = self.places.iter().filter(|place| place.not_before > now);
        places.fold(0, |bits, place| bits | 1 << place.rung)
    }

    pub(super) fn poll<S, Req>(
        &mut self,
        ladder: &Ladder<S, Req>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(usize, Slot), Refusal>> {
        loop {
            let now = self.clock.now();
            while self.next_tier.is_some_and(|at| at <= now) {
                match self.look_again(ladder, now) {
                    Some(at) => self.next_tier = Some(at),
                    None => self.join_next(ladder, now),
                }
            }
            let mut again_at = self.next_tier.unwrap_or(Time::MAX).min(self.wait.until);
            for place in &mut self.places {
                match place.poll(ladder, self.key, &self.wait, self.clock, now, cx) {
                    Ok(slot) => {
                        let rung = place.rung;
                        // All other places are given up, this one was served.
                        for place in &mut self.places {
                            (place.entry, place.rest) = (None, None);
                        }
                        return Poll::Ready(Ok((rung, slot)));
                    }
                    Err(at) => again_at = again_at.min(at),
                }
            }
            if now >= self.wait.until
                || (self.places.is_empty() && self.next_tier.is_none())
                || self.is_in_vain(ladder, now)
            {
                return Poll::Ready(Err(self.refusal(ladder, now)));
            }
            // The timer is polled after each reset: one that is due already would not wake us.
            self.sleep.as_mut().reset(self.clock.instant(again_at));
            match self.sleep.as_mut().poll(cx) {
                Poll::Ready(()) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Until when to stay at this tier, if it is to be looked at again and there is still reason to.
    fn look_again<S, Req>(&mut self, ladder: &Ladder<S, Req>, now: Time) -> Option<Time> {
        let look = self.look?;
        let waited = now.saturating_since(self.since);
        let mut patience: Option<Duration> = None;
        for place in self.places.iter().filter(|place| self.tier & (1 << place.rung) != 0) {
            let provider = &ladder.rungs[place.rung].provider;
            let there = at(self.clock, provider.clock(), now);
            let outlook = match place.entry {
                Some(_) => provider.outlook_of_last(there),
                None => provider.outlook(there),
            };
            if let Step::Stay(left) = step(ladder.patience, waited, outlook) {
                patience = patience.max(Some(left));
            }
        }
        self.look = Some(look.saturating_mul(2));
        patience.map(|left| now.saturating_add(left.min(look)))
    }

    /// Takes a place at every rung of the next tier, and sees when to go on to the one after.
    fn join_next<S, Req>(&mut self, ladder: &Ladder<S, Req>, now: Time) {
        self.next_tier = None;
        let Some(first) = ladder.next(self.key, self.done | self.joined) else { return };
        let tier = ladder.rungs[first].tier;
        let mut patience: Option<Duration> = None;
        (self.tier, self.since, self.look) = (0, now, None);
        for (i, rung) in ladder.rungs.iter().enumerate() {
            let bit = 1 << i;
            if rung.tier != tier || (self.done | self.joined) & bit != 0 {
                continue;
            }
            self.joined |= bit;
            // Before it joins: the outlook is that of the place it will get.
            let there = at(self.clock, rung.provider.clock(), now);
            let mut outlook = rung.provider.outlook(there);
            if let Some(until) = rung.provider.bars_until(self.key) {
                outlook.pause = outlook.pause.max(until.saturating_since(there));
            }
            let stay = match step(ladder.patience, Duration::ZERO, outlook) {
                Step::Overflow => Duration::ZERO,
                Step::Stay(time) => time,
            };
            patience = patience.max(Some(stay));
            self.tier |= bit;
            if rung.provider.is_led() {
                self.look = Some(LOOK);
            }
            self.places.push(Place::new(i));
        }
        if ladder.next(self.key, self.done | self.joined).is_some() {
            let stay = patience.unwrap_or_default();
            self.next_tier = Some(now.saturating_add(self.look.map_or(stay, |look| look.min(stay))));
        }
    }

    /// Whether every rung that is left is paused, or bars this task, beyond the end of the wait, or usually takes
    /// longer than there is time. (The queues' estimates are no reason to give up: they count tasks that will be
    /// served elsewhere.)
    fn is_in_vain<S, Req>(&self, ladder: &Ladder<S, Req>, now: Time) -> bool {
        let mut rungs = ladder.rungs.iter().enumerate().filter(|(i, _)| self.done & (1 << i) == 0);
        rungs.all(|(_, rung)| {
            let there = |time| at(self.clock, rung.provider.clock(), time);
            let end = there(self.wait.until);
            !rung.provider.has_time(self.wait.left(now).time)
                || rung.provider.is_paused_beyond(end, there(now))
                || rung.provider.bars_until(self.key).is_some_and(|until| until > end)
        })
    }

    /// Nothing can be had before the end: when might it be?
    fn refusal<S, Req>(&mut self, ladder: &Ladder<S, Req>, now: Time) -> Refusal {
        // Its own places are not in its way.
        self.places.clear();
        let rungs = ladder.rungs.iter().enumerate().filter(|(i, _)| self.done & (1 << i) == 0);
        let wait = |provider: &Provider| {
            let there = at(self.clock, provider.clock(), now);
            let barred = provider.bars_until(self.key).unwrap_or_default();
            provider.estimate(there).max(barred.saturating_since(there))
        };
        let at = rungs.map(|(_, rung)| now.saturating_add(wait(&rung.provider))).min();
        let why = "no rung had room for it before its deadline";
        ladder.refuse(RefusalKind::NoRung, why, at.map(|at| self.clock.instant(at)))
    }
}

/// `time` of one clock on another: the rungs may come from several fleets, whose clocks have each an origin
/// of their own.
fn at(from: Clock, to: Clock, time: Time) -> Time {
    if from == to || time == Time::MAX { time } else { to.time(from.instant(time)) }
}

impl Place {
    fn new(rung: usize) -> Self {
        Place { rung, not_before: Time::ZERO, refusals: 0, entry: None, rest: None }
    }

    /// A slot, or the instant (by `clock`, the ladder's) at which to ask again if nobody wakes us before.
    fn poll<S, Req>(
        &mut self,
        ladder: &Ladder<S, Req>,
        key: Key,
        wait: &WaitFor,
        clock: Clock,
        now: Time,
        cx: &mut Context<'_>,
    ) -> Result<Slot, Time> {
        if now < self.not_before {
            (self.entry, self.rest) = (None, None);
            return Err(self.not_before);
        }
        let provider = &ladder.rungs[self.rung].provider;
        let there = at(clock, provider.clock(), now);
        let left = wait.left(now);
        self.ask(provider, key, wait, left, there, cx)
            .map_err(|again_at| at(provider.clock(), clock, again_at))
    }

    fn ask(
        &mut self,
        provider: &Provider,
        key: Key,
        wait: &WaitFor,
        left: Left,
        now: Time,
        cx: &mut Context<'_>,
    ) -> Result<Slot, Time> {
        if let Some(probe) = provider.try_long_probe(now, left) {
            return Ok(probe);
        }
        let probe_at = provider.probe_at(now).unwrap_or(Time::MAX);
        // It is not back here yet: it stands in nobody's way, and looks again when it is.
        if let Some(until) = provider.bars_until(key) {
            (self.entry, self.rest) = (None, None);
            return Err(until.min(probe_at));
        }
        if let Some(until) = provider.rest(now, wait.until, &mut self.rest, cx.waker()) {
            self.entry = None;
            return Err(until.min(probe_at));
        }
        // A slot would be wasted on it here; another rung may be quicker.
        if !provider.has_time(left.time) {
            self.entry = None;
            return Err(probe_at);
        }
        let entry = match &mut self.entry {
            Some(entry) => entry,
            // A full queue is a rung without room: looked at again when something else happens.
            none => match provider.join(wait, now) {
                Ok(entry) => none.insert(entry),
                Err(_) => return Err(now.saturating_add(Duration::from_millis(100))),
            },
        };
        provider.core().check_lease();
        match entry.poll_claim(now, cx) {
            Claimed::Got((core, admitted)) => {
                self.entry = None;
                Ok(Slot::new(core, Some(admitted)))
            }
            Claimed::Wait { again_at } => Err(again_at.unwrap_or(Time::MAX).min(probe_at)),
        }
    }
}
