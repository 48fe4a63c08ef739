//! What the book holds of one process.

use super::rates::{self, Held};
use crate::store::{Limits, Quantity, Report, Terms};

/// The longest that anything lasts here: a pause, a term. So sums of times stay exact in the numbers of Lua.
pub(super) const DAY: u64 = 24 * 3600 * 1000;
/// The most slots there can be.
pub(super) const MOST: u32 = (1 << 20) - 1;
/// Products with sums of weights are to fit too.
const HEAVIEST: u32 = 1000;

/// One process. Its times are those of the book.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) label: String,
    pub(super) seq: u64,
    pub(super) version: u64,
    /// Slots that it may have in flight at worst.
    pub(super) charge: u64,
    pub(super) need: u64,
    pub(super) headroom: u64,
    pub(super) busy: u64,
    pub(super) weight: u64,
    /// The most that it may believe it has after its lease has run out,
    pub(super) safe: u64,
    /// and what it was told last.
    pub(super) safe_told: u64,
    /// What it should have, by the last pass over all.
    pub(super) target: u64,
    /// Service for its weight, in slot-milliseconds, up to `heard`. It is turns, not time: see `enter`.
    pub(super) pass: f64,
    /// When its last report was taken in.
    pub(super) heard: u64,
    /// When its lease has run out, by the book; or if it has, when what is `safe` is free too.
    pub(super) until: u64,
    pub(super) grace: u64,
    /// The book was silent, and it was not heard of since.
    pub(super) pending: bool,
    /// Its lease has run out, and it has only what is `safe`.
    pub(super) lapsed: bool,
    /// It said goodbye: kept so that what comes late from it is known to be late.
    pub(super) left: bool,
    pub(super) limits: Limits,
    pub(super) rates: [Held; 2],
}

impl Record {
    pub(super) fn new(version: u64, now: u64, limits: Limits) -> Self {
        Record {
            label: String::new(),
            seq: 0,
            version,
            charge: 0,
            need: 0,
            headroom: 0,
            busy: 0,
            weight: 1,
            safe: 0,
            safe_told: 0,
            target: 0,
            pass: 0.0,
            heard: now,
            until: now,
            grace: 0,
            pending: false,
            lapsed: false,
            left: false,
            limits,
            rates: [Held::default(); 2],
        }
    }

    /// Whether it is one of those who share.
    pub(super) fn is_member(&self) -> bool {
        !self.lapsed && !self.left
    }

    /// Its service for its weight until now.
    #[expect(
        clippy::cast_precision_loss,
        reason = "the same doubles as in Lua; their order is all that counts"
    )]
    pub(super) fn pass_at(&self, now: u64) -> f64 {
        self.pass + self.charge as f64 * now.saturating_sub(self.heard) as f64 / self.weight as f64
    }

    /// What it has in flight, as far as can be known: a slot that was given to one who waits for it is in use from
    /// then on, and that is reported only much later.
    pub(super) fn in_use(&self) -> u64 {
        self.busy.max(self.need.min(self.charge))
    }

    /// What it asks for: of who was silent for a while, no more than it has. Its turn goes to the next.
    pub(super) fn asks(&self, now: u64, patience: u64) -> (u64, u64) {
        if !self.is_member() {
            (0, 0)
        } else if now.saturating_sub(self.heard) > patience {
            (self.need.min(self.charge), 0)
        } else {
            (self.need, self.headroom)
        }
    }

    /// Its time is over: first to what is safe, then altogether. False if nothing is left of it.
    pub(super) fn expire(&mut self, now: u64) -> bool {
        if now >= self.until && !self.lapsed && self.safe.min(self.charge) > 0 {
            self.pass = self.pass_at(self.until);
            self.lapse();
        }
        now < self.until
    }

    /// The book has another life, in which all leases have run out by `until`, and this may be what its holder
    /// still has. False if nothing is left of it.
    pub(super) fn outlive(&mut self, until: u64) -> bool {
        if self.safe.min(self.charge) == 0 {
            return false;
        }
        // There was no service in this life yet.
        (self.until, self.pass) = (until, 0.0);
        self.lapse();
        true
    }

    fn lapse(&mut self) {
        self.heard = self.until;
        self.charge = self.charge.min(self.safe);
        self.busy = self.busy.min(self.charge);
        self.until += self.grace;
        (self.lapsed, self.pending) = (true, false);
        (self.need, self.headroom, self.target) = (0, 0, 0);
    }

    /// What it may have in flight at worst, now that it has reported.
    ///
    /// - It has seen the newest grant (`acked`): no more than it says it holds. Only so does a charge fall.
    /// - It has not: whatever it says, the grant may be on its way to it.
    /// - Its lease has run out: it may still use what is safe, and what is in flight is.
    /// - The book was lost (`hard`), and it was given its slots by the one before: what it says.
    ///
    /// What is in flight is real, whatever the book says. What is held beyond is a promise, and only the book
    /// that made it counts it.
    pub(super) fn claim(record: Option<&Record>, report: &Report, acked: bool, hard: bool) -> u64 {
        let (held, busy) = (u64::from(report.held), u64::from(report.busy));
        let charge = record.map_or(0, |record| record.charge).max(if hard { held } else { 0 });
        (if acked { held.min(charge) } else { charge }).max(busy)
    }

    /// Takes over what the report says.
    pub(super) fn update(&mut self, report: &Report, now: u64) {
        let terms = Times::of(&report.terms);
        self.label.clone_from(&report.label);
        self.seq = report.seq;
        self.weight = u64::from(report.weight.clamp(1, HEAVIEST));
        self.busy = report.busy.into();
        self.heard = now;
        self.until = now + terms.learning();
        self.grace = terms.grace;
        self.limits = report.limits.clone();
        (self.pending, self.lapsed, self.left) = (false, false, report.bye);
        (self.need, self.headroom) =
            if report.bye { (0, 0) } else { (report.need.into(), report.headroom.max(report.need).into()) };
        for of in [Quantity::Requests, Quantity::Tokens] {
            let want = report
                .rates
                .iter()
                .find(|rate| rate.of == of && !report.bye)
                .map_or(0, |rate| rate.want.min(rates::MOST));
            self.rates[of as usize].want = want;
        }
    }
}

/// [`Terms`] within bounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    ttl: u64,
    extra: u64,
    pub(super) gap: u64,
    pub(super) grace: u64,
    pub(super) keep: f64,
    pub(super) trickle: u64,
}

impl Times {
    pub(super) fn of(terms: &Terms) -> Self {
        Times {
            ttl: terms.ttl.min(DAY),
            extra: terms.extra.min(DAY),
            gap: terms.gap.clamp(100, DAY),
            grace: terms.grace.min(DAY),
            // Not a number is below any.
            keep: if terms.keep > 0.0 { terms.keep.min(1.0) } else { 0.0 },
            trickle: terms.trickle.into(),
        }
    }

    pub(super) fn learning(&self) -> u64 {
        self.ttl + self.extra
    }
}
