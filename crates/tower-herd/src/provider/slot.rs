use super::{Core, Provider, Scope, control::Admitted, pause::PauseReason};
use crate::{Time, gate::Blocked};
use std::sync::Arc;

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
    /// The scope whose pause this call probes; see `probes`.
    scope: Option<Arc<Scope>>,
    /// It probes a pause: the scope's, if there is one here, or else the provider's.
    probes: bool,
    sent: bool,
    held: bool,
}

impl Slot {
    /// The guard of a slot that was just taken from the gate of `core`.
    #[inline]
    pub(crate) fn new(core: Arc<Core>, admitted: Option<Admitted>) -> Self {
        Slot { place: Place { core, scope: None, probes: false, sent: false, held: true }, admitted }
    }

    /// Tells providers apart.
    #[inline]
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.place.core).addr()
    }

    pub(super) fn is_probe(&self) -> bool {
        self.place.probes
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
    /// The call is over: its place is free now.
    #[inline]
    pub(crate) fn end(mut self) {
        self.sent = false;
    }
}

impl Drop for Place {
    #[inline]
    fn drop(&mut self) {
        if self.probes {
            self.probe_ended();
        }
        if !self.held {
            return;
        }
        if self.sent {
            self.linger();
        } else {
            self.core.gate.release();
        }
    }
}

impl Place {
    #[cold]
    #[inline(never)]
    fn linger(&self) {
        let time = self.core.linger();
        if time.is_zero() {
            self.core.gate.release();
        } else {
            self.core.gate.release_at(self.core.clock().now().saturating_add(time));
        }
    }

    #[cold]
    fn probe_ended(&self) {
        self.scope.as_deref().unwrap_or(&self.core.root).change(super::pause::Pause::probe_ended);
    }
}

/// Why there is no slot right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The scope or the provider is paused.
    Paused(Time, PauseReason),
    /// All slots are taken, or others wait, or the next may go only later.
    NoSlot,
}

impl Provider {
    /// A slot, if one may be had at once.
    #[inline]
    pub(crate) fn try_slot(&self) -> Result<Slot, Denied> {
        let open = self.scope.as_ref().is_none_or(|scope| scope.is_open());
        // The gate is told to be slow while the provider itself is paused.
        if open && self.core.gate.try_acquire() {
            return Ok(Slot::new(self.core.clone(), None));
        }
        self.try_slot_slow()
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
    fn try_slot_slow(&self) -> Result<Slot, Denied> {
        let now = self.core.clock().now();
        if let Some((until, reason)) = self.paused_at(now) {
            return self.try_probe(now).ok_or(Denied::Paused(until, reason));
        }
        match self.core.gate.try_admit(now) {
            Ok(admitted) => Ok(Slot::new(self.core.clone(), Some(admitted))),
            Err(Blocked::Slot | Blocked::Until(_)) => Err(Denied::NoSlot),
        }
    }

    /// The probe of a long pause, if one is due.
    pub(crate) fn try_long_probe(&self, now: Time) -> Option<Slot> {
        if self.paused_at(now).is_some() { self.try_probe(now) } else { None }
    }

    /// When who waits for the end of a long pause should ask for its next probe.
    pub(crate) fn long_probe_due(&self, now: Time) -> Option<Time> {
        let due = |scope: &Scope| scope.paused(now).and_then(|_| scope.change(|pause| pause.probe_at()));
        let due = due(&self.core.root).or_else(|| self.scope.as_deref().and_then(due));
        due.filter(|at| *at > now)
    }

    /// The sparse probe of a long pause. It takes no slot of the ceiling: nobody else is in flight.
    fn try_probe(&self, now: Time) -> Option<Slot> {
        let probe = |pause: &mut super::pause::Pause| pause.take_probe(now);
        let root = self.core.root.paused(now).is_some();
        let scoped = self.scope.as_ref().filter(|scope| scope.paused(now).is_some());
        let scope = match (root, scoped) {
            (true, None) => self.core.root.change(probe).then_some(None),
            (false, Some(scope)) => scope.change(probe).then(|| Some(scope.clone())),
            // Two pauses at once: the longer one's probe would run into the other.
            _ => None,
        }?;
        let place = Place { core: self.core.clone(), scope, probes: true, sent: false, held: false };
        Some(Slot { place, admitted: None })
    }
}
