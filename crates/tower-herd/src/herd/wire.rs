//! One call on the wire: its slot and its watch, in one guard.

use crate::{
    HasTask, Kind, Provider, Signal,
    classify::Report,
    provider::{Core, Place, Slot, handover},
};
use std::sync::Arc;

/// A call that was sent: watched, and holding a slot. Dropped before its end it counts as given up, and
/// its slot lingers.
pub(super) struct OnWire {
    /// None: settled.
    report: Option<Report>,
    hold: Hold,
}

enum Hold {
    /// A bare slot of the provider that the report is about: one handle fewer to clone.
    Bare,
    /// One that was granted further out.
    Place(Place),
}

impl OnWire {
    /// `request` is about to be sent, with a bare slot.
    #[inline]
    pub(super) fn bare<Req: HasTask>(provider: &Provider, request: &Req) -> Self {
        drop(handover::Admitting::new(provider.core(), None));
        OnWire { report: Some(Report::begin(provider, request)), hold: Hold::Bare }
    }

    /// `request` is about to be sent, with a slot that was granted further out.
    #[inline]
    pub(super) fn granted<Req: HasTask>(provider: &Provider, request: &Req, slot: Slot) -> Self {
        let admitting = handover::Admitting::new(provider.core(), slot.admitted());
        let report = Some(Report::begin(provider, request));
        drop(admitting);
        OnWire { report, hold: Hold::Place(slot.sent()) }
    }

    #[inline]
    pub(super) fn report(&mut self) -> &mut Report {
        self.report.as_mut().expect("settled by value only")
    }

    /// The reply has ended: well, or with this signal. In place, since it is large; what is left is empty.
    #[inline]
    pub(super) fn end(&mut self, late: Option<&Signal>) {
        if let Some(report) = &mut self.report {
            // Who listens to it may panic: then the slot is left to the drop.
            report.end(late);
            match std::mem::replace(&mut self.hold, Hold::Bare) {
                Hold::Bare => report.core().release(),
                Hold::Place(place) => place.end(),
            }
            self.report = None;
        }
    }

    /// We waited long enough for its reply; it may still run there, so its slot lingers.
    pub(super) fn give_up(&mut self) {
        self.report().end(Some(&Signal::new(Kind::Failed)));
    }

    /// What it is made of.
    pub(super) fn into_parts(mut self) -> (Report, Place) {
        let report = self.report.take().expect("settled by value only");
        let place = match std::mem::replace(&mut self.hold, Hold::Bare) {
            Hold::Bare => Slot::new(report.core().clone(), None).sent(),
            Hold::Place(place) => place,
        };
        (report, place)
    }
}

impl Drop for OnWire {
    #[inline]
    fn drop(&mut self) {
        // The report goes before the slot: what the call taught is known when its place becomes free.
        if let Some(report) = self.report.take()
            && let Hold::Bare = self.hold
        {
            // Whoever hears of it may panic.
            let slot = Later(report.core().clone());
            drop(report);
            drop(slot);
        }
    }
}

/// A bare slot that is given back when its call has ended at the provider too.
struct Later(Arc<Core>);

impl Drop for Later {
    fn drop(&mut self) {
        self.0.release_later();
    }
}
