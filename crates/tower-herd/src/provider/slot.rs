use super::{
    Core, Provider, Scope,
    control::Admitted,
    pause::{Pause, PauseReason},
};
use crate::{RefusalKind, Time, gate::Blocked};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::Instant;

/// Leave for one call: a place under the ceiling, and what it was admitted as. Given back when dropped.
#[must_use = "dropped, it is given back"]
pub(crate) struct Slot {
    place: Place,
    /// What the gate's pacer admitted it as; none on the fast path.
    admitted: Option<Admitted>,
}

/// The place of one call in flight. Given back when dropped; if the call was sent and then dropped before
/// its end, later, since it may still run at the provider.
///
/// It travels with the reply, so it is small.
#[must_use = "dropped, it is given back"]
pub(crate) struct Place {
    core: Arc<Core>,
    /// The scope whose pause this call probes.
    scope: Option<Arc<Scope>>,
    /// It probes the pause of the whole provider (or both, where both are paused).
    root: bool,
    sent: bool,
    /// It was given back already; what is left is the probe.
    freed: bool,
    /// Which probe it is.
    probe: u32,
}

impl Slot {
    /// The guard of a slot that was just taken from the gate of `core`.
    #[inline]
    pub(crate) fn new(core: Arc<Core>, admitted: Option<Admitted>) -> Self {
        let place = Place { core, scope: None, root: false, sent: false, freed: false, probe: 0 };
        Slot { place, admitted }
    }

    /// Tells providers apart.
    #[inline]
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.place.core).addr()
    }

    pub(super) fn is_probe(&self) -> bool {
        self.place.is_probe()
    }

    #[inline]
    pub(crate) fn admitted(&self) -> Option<Admitted> {
        self.admitted
    }

    /// From here on the provider may be at work on the call.
    #[inline]
    pub(crate) fn sent(self) -> Place {
        let mut place = self.place;
        place.sent = true;
        place
    }
}

impl Place {
    #[inline]
    fn is_probe(&self) -> bool {
        self.root || self.scope.is_some()
    }

    /// The call is over: its place is free now.
    #[inline]
    pub(crate) fn end(mut self) {
        self.sent = false;
    }

    /// Nobody has taken this probe's slot: those further in are hidden, or there are none. Whoever is
    /// there takes a slot of its own, so this one is given back; the probe stays ours until it is sent.
    pub(crate) fn lend(&mut self) {
        self.core.release();
        self.freed = true;
        self.each(Pause::lend_probe);
    }

    fn each(&self, mut change: impl FnMut(&mut Pause, u32)) {
        if self.root {
            self.core.root.change(|pause| change(pause, self.probe));
        }
        if let Some(scope) = &self.scope {
            scope.change(|pause| change(pause, self.probe));
        }
    }
}

impl Drop for Place {
    #[inline]
    fn drop(&mut self) {
        if self.is_probe() {
            self.probe_ended();
        }
        if self.freed {
        } else if self.sent {
            self.core.release_later();
        } else {
            self.core.release();
        }
    }
}

impl Core {
    /// Gives a slot back.
    #[inline]
    pub(crate) fn release(&self) {
        if self.gate.release() {
            self.has_shed();
        }
    }

    /// Gives the slot of a call back that was sent and then dropped: when it has ended at the provider
    /// too, as far as one can tell.
    #[cold]
    #[inline(never)]
    pub(crate) fn release_later(&self) {
        let time = self.linger();
        if time.is_zero() {
            self.release();
        } else {
            self.gate.release_at(self.clock().now().saturating_add(time));
        }
    }
}

impl Place {
    #[cold]
    fn probe_ended(&self) {
        let tell = |on: &Scope| {
            if let Some(failed) = on.change(|pause| pause.probe_ended(self.probe)) {
                self.core.tell_probed(on, failed);
            }
        };
        if self.root {
            tell(&self.core.root);
        }
        if let Some(scope) = &self.scope {
            tell(scope);
        }
    }
}

/// The time that a call would have if it went now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    /// Until its task's deadline.
    pub(crate) time: Duration,
    /// So much of it has passed in waiting.
    pub(crate) waited: Duration,
}

/// Who asks for a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asker {
    /// It looks from outside: what is on its way inside already is not its.
    Ladder,
    Gate,
}

/// Why there is no slot right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The scope or the provider is paused.
    Paused(Time, PauseReason),
    /// All slots are taken, or others wait, or the next may go only later.
    NoSlot,
}

impl Denied {
    /// As what a layer would refuse it.
    pub(crate) fn kind(self) -> RefusalKind {
        match self {
            Denied::Paused(..) => RefusalKind::Paused,
            Denied::NoSlot => RefusalKind::NoSlot,
        }
    }
}

impl Provider {
    /// A slot, if one may be had at once. `end`: the deadline of the call, if it has one.
    #[inline]
    pub(crate) fn try_slot(&self, end: impl FnOnce() -> Option<Instant>) -> Result<Slot, Denied> {
        self.try_slot_of(Asker::Ladder, end)
    }

    /// The same for a gate: a probe that a breaker further out has lent comes through it.
    #[inline]
    pub(crate) fn try_gate_slot(&self, end: impl FnOnce() -> Option<Instant>) -> Result<Slot, Denied> {
        self.try_slot_of(Asker::Gate, end)
    }

    #[inline]
    fn try_slot_of(&self, asker: Asker, end: impl FnOnce() -> Option<Instant>) -> Result<Slot, Denied> {
        let open = self.scope.as_ref().is_none_or(|scope| scope.is_open());
        // The gate is told to be slow while the provider itself is paused.
        if open && self.core.gate.try_acquire() && self.core.is_in_time() {
            return Ok(Slot::new(self.core.clone(), None));
        }
        self.try_slot_slow(asker, end())
    }

    /// A bare slot, if one is free and nothing stands in the way: its owner gives it back with
    /// [`Core::release`] or [`Core::release_later`].
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn try_bare_slot(&self) -> bool {
        self.is_open() && self.core.gate.try_acquire() && self.core.is_in_time()
    }

    /// Whether nothing stands in the way of a call but the ceiling: no pause, and no end of one.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.scope.as_ref().is_none_or(|scope| scope.is_open()) && !self.core.gate.is_slow()
    }

    /// Whether a pause began since `slot` was granted.
    pub(crate) fn paused_since(&self, slot: &Option<Slot>) -> bool {
        self.paused().is_some() && !slot.as_ref().is_some_and(Slot::is_probe)
    }

    #[cold]
    #[inline(never)]
    fn try_slot_slow(&self, asker: Asker, end: Option<Instant>) -> Result<Slot, Denied> {
        let now = self.core.clock().now();
        self.core.check_lease();
        if let Some((until, reason)) = self.paused_at(now) {
            let lent = if asker == Asker::Gate { self.try_lent_probe(now) } else { None };
            return lent
                .or_else(|| self.try_probe(now, self.left(end, now)))
                .ok_or(Denied::Paused(until, reason));
        }
        match self.core.gate.try_admit(now) {
            Ok(admitted) => Ok(Slot::new(self.core.clone(), Some(admitted))),
            Err(Blocked::Slot | Blocked::Until(_)) => {
                self.core.demand();
                Err(Denied::NoSlot)
            }
        }
    }

    /// The time of a call that has not waited.
    pub(crate) fn left(&self, end: Option<Instant>, now: Time) -> Left {
        let time = end.map_or(Duration::MAX, |end| self.core.clock().time(end).saturating_since(now));
        Left { time, waited: Duration::ZERO }
    }

    /// The probe of a long pause, if one is due, for a call that has so much time left.
    pub(crate) fn try_long_probe(&self, now: Time, left: Left) -> Option<Slot> {
        if self.paused_at(now).is_some() { self.try_probe(now, left) } else { None }
    }

    /// Whether there is one to be had, for who could get a slot.
    pub(crate) fn probe_is_due(&self, now: Time) -> bool {
        let (root, scope) = self.pauses(now);
        let is_due = |on: &Scope| self.asks_for_probe(on, now);
        (root.is_some() || scope.is_some()) && root.is_none_or(is_due) && scope.is_none_or(|on| is_due(on))
    }

    /// When to look for such a probe again, if [`try_long_probe`](Self::try_long_probe) gave none.
    pub(crate) fn probe_at(&self, now: Time) -> Option<Time> {
        let (root, scope) = self.pauses(now);
        let at = |on: &Scope| on.change(|pause| pause.probe_at(now));
        let or_end = |on: &Scope| on.change(|pause| pause.probe_at(now).unwrap_or(pause.until()));
        match (root, scope) {
            (None, None) => None,
            (Some(root), None) => at(root),
            (None, Some(scope)) => at(scope),
            (Some(root), Some(scope)) => Some(or_end(root).max(or_end(scope))),
        }
    }

    /// Which of the two are paused.
    fn pauses(&self, now: Time) -> (Option<&Scope>, Option<&Arc<Scope>>) {
        let root = self.core.root.paused(now).map(|_| &self.core.root);
        (root, self.scope.as_ref().filter(|scope| scope.paused(now).is_some()))
    }

    /// The sparse probe of a long pause, or that of an open breaker. It takes a slot like any call: those of
    /// other scopes, and calls sent before the pause, may fill the ceiling.
    ///
    /// A call that would be cut before its reply proves nothing, and keeps the others from asking meanwhile: it
    /// leaves the probe to who has more time. Where nothing is known of what calls take, that is who has most of
    /// its time before it. But if nobody has enough, for long, such a probe is better than none.
    fn try_probe(&self, now: Time, left: Left) -> Option<Slot> {
        const LONG: Duration = Duration::from_secs(10);
        let enough = self.core.nearly_always().unwrap_or(left.waited);
        if left.time < enough && !self.probe_is_due(now.saturating_sub(LONG)) {
            return None;
        }
        let slot = self.probe_if(now, |on| self.asks_for_probe(on, now), Pause::take_probe);
        if slot.is_some() {
            let (root, scope) = self.pauses(now);
            root.into_iter().chain(scope.map(|scope| &**scope)).for_each(|on| self.core.used_leave(on));
        }
        slot
    }

    /// Whether a probe may go now: its time has come, and the fleet leaves it to this process.
    fn asks_for_probe(&self, on: &Scope, now: Time) -> bool {
        on.change(|pause| pause.probe_is_due(now)) && self.core.may_probe(on, now)
    }

    /// A probe that was let out further out, and is on its way here.
    fn try_lent_probe(&self, now: Time) -> Option<Slot> {
        self.probe_if(now, |on| on.change(|pause| pause.probe_is_lent(now)), Pause::adopt_probe)
    }

    fn probe_if(
        &self,
        now: Time,
        is_due: impl Fn(&Scope) -> bool,
        take: fn(&mut Pause, Time, u32) -> bool,
    ) -> Option<Slot> {
        let (root, scope) = self.pauses(now);
        let number = self.core.probes.fetch_add(1, Ordering::Relaxed);
        let take = |on: &Scope| on.change(|pause| take(pause, now, number));
        // Where both are paused it is a probe of both, or a call too early for one.
        let due = root.is_none_or(&is_due) && scope.is_none_or(|scope| is_due(scope));
        if !due || !self.core.gate.try_take(now, |control, busy| busy < control.ceiling()) {
            return None;
        }
        if !self.core.is_in_time() {
            return None;
        }
        let mut slot = Slot::new(self.core.clone(), None);
        if root.is_some_and(|root| !take(root)) {
            return None;
        }
        if scope.is_some_and(|scope| !take(scope)) {
            if let Some(root) = root {
                root.change(|pause| pause.untake_probe(now));
            }
            return None;
        }
        (slot.place.root, slot.place.scope, slot.place.probe) = (root.is_some(), scope.cloned(), number);
        Some(slot)
    }
}
