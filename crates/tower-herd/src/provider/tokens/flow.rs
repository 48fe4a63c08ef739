//! Tokens a minute, and who waits for them: pure, fed with instants.
//!
//! The bucket is a debt that is paid back at the rate (virtual scheduling, ITU-T I.371; GCRA): a call fits
//! if the debt it leaves is no more than the burst. The arithmetic is in whole nanoseconds times tokens a
//! minute, so an instant that is told is exact: one nanosecond earlier the call does not fit.
//!
//! Who finds no tokens stands in line: interactive before batch, in order within a class; an old batch
//! waiter takes turns with the interactive ones. Only the first of the line is served; a large call is not
//! passed by small ones behind it, or it would never be made.

use crate::{Time, gate::Class, provider::wallet::Wallet};
use std::{collections::BTreeMap, mem, task::Waker, time::Duration};

/// Of a debt of one token: as many as there are nanoseconds in a minute.
const TOKEN: u128 = 60_000_000_000;

/// However much a call says it has used: a pause holds no longer, either.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The debt of a provider's tokens.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// Tokens a minute.
    rate: u64,
    /// The most tokens at once.
    burst: u64,
    /// In tokens times [`TOKEN`]: each nanosecond pays back `rate` of it.
    debt: u128,
    at: Time,
    /// Where a fleet shares the rate: what this process has of it. `rate` is then its share.
    wallet: Option<Wallet>,
    /// Taken since this was last asked for.
    spent: u64,
}

impl Bucket {
    pub(super) fn new(rate: u64, burst: u64) -> Self {
        let (rate, burst) = (rate.max(1), burst.max(1));
        Bucket { rate, burst, debt: 0, at: Time::ZERO, wallet: None, spent: 0 }
    }

    /// One of a fleet, with nothing in it.
    pub(super) fn shared(rate: u64, burst: u64) -> Self {
        Bucket { wallet: Some(Wallet::default()), ..Bucket::new(rate, burst) }
    }

    fn configure(&mut self, rate: u64, burst: u64) {
        (self.rate, self.burst) = (rate.max(1), burst.max(1));
    }

    #[cfg(feature = "store")]
    fn fill(&mut self, now: Time, amount: u64, until: Time) {
        self.pay_back(now);
        // (What was overspent alone is no debt to the fleet, which took it out of its share.)
        self.wallet.get_or_insert_default().fill(now, amount, until);
    }

    /// The store is lost: so many a minute, beginning with none.
    #[cfg(feature = "store")]
    fn fend(&mut self, now: Time, rate: u64) {
        if self.wallet.take().is_some() {
            self.at = self.at.max(now);
            self.debt = u128::from(self.burst) * TOKEN;
        }
        self.rate = rate.max(1);
    }

    pub(super) fn burst(&self) -> u64 {
        self.burst
    }

    fn pay_back(&mut self, now: Time) {
        let passed = now.saturating_since(self.at).as_nanos();
        if self.wallet.is_none() {
            self.debt = self.debt.saturating_sub(passed * u128::from(self.rate));
        }
        self.at = self.at.max(now);
    }

    fn fits(&self, cost: u64) -> bool {
        if let Some(wallet) = &self.wallet {
            return wallet.affords(self.at, cost.min(self.burst));
        }
        self.debt + u128::from(cost.min(self.burst)) * TOKEN <= u128::from(self.burst) * TOKEN
    }

    fn take(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
        if let Some(wallet) = &mut self.wallet {
            wallet.take(self.at, cost);
            wallet.owe_at_most(self.burst.saturating_add(self.rate.saturating_mul(LONGEST.as_secs() / 60)));
            return;
        }
        let most = u128::from(self.burst) * TOKEN + u128::from(self.rate) * LONGEST.as_nanos();
        self.debt = self.debt.saturating_add(u128::from(cost) * TOKEN).min(most);
    }

    fn give_back(&mut self, cost: u64) {
        self.spent = self.spent.saturating_sub(cost);
        if let Some(wallet) = &mut self.wallet {
            return wallet.give_back(cost);
        }
        self.debt = self.debt.saturating_sub(u128::from(cost) * TOKEN);
    }

    /// When `cost` fits after so many tokens more, as of the last instant seen.
    fn ready_at(&self, ahead: u128, cost: u64) -> Time {
        let cost = (ahead + u128::from(cost.min(self.burst))) * TOKEN;
        let excess = match &self.wallet {
            // When its share of the rate has brought so much: chunks may come sooner.
            Some(wallet) => {
                let holds = u128::from(wallet.holds(self.at)) * TOKEN;
                (cost + u128::from(wallet.owes()) * TOKEN).saturating_sub(holds)
            }
            None => (self.debt + cost).saturating_sub(u128::from(self.burst) * TOKEN),
        };
        let nanos = excess.div_ceil(u128::from(self.rate));
        self.at.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// What a fleet's store is told of the tokens of one process.
#[cfg(feature = "store")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::provider) struct Asked {
    /// Taken since this was last asked for.
    pub(in crate::provider) spent: u64,
    pub(in crate::provider) holds: u64,
    pub(in crate::provider) owes: u64,
    /// All that waits, and the first of it.
    pub(in crate::provider) waiting: u64,
    pub(in crate::provider) first: u64,
    /// The most that there is at once.
    pub(in crate::provider) burst: u64,
}

/// Names one waiter, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    number: u64,
    class: Class,
}

struct Waiter {
    cost: u64,
    since: Time,
    /// All that had come to the line of its class before it.
    before: u128,
    waker: Option<Waker>,
}

/// The line of one class, by arrival.
#[derive(Default)]
struct Line {
    waiters: BTreeMap<u64, Waiter>,
    /// Tokens that ever came to this line, and that left it.
    came: u128,
    gone: u128,
}

impl Line {
    fn tokens(&self) -> u128 {
        self.came - self.gone
    }

    fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        self.gone += u128::from(waiter.cost);
        Some(waiter)
    }
}

/// The answer to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// The tokens are taken.
    Got,
    Wait {
        /// Ask again then, woken or not.
        again_at: Time,
        /// It is not served before.
        at_least: Time,
    },
}

/// The bucket and its lines.
pub(in crate::provider) struct Flow {
    pub(super) bucket: Bucket,
    lines: [Line; 2],
    /// Served, but not told yet: their tokens are taken.
    served: BTreeMap<u64, u64>,
    /// Who keeps the time: the first of the line, when it last asked. Age may have changed that since.
    keeper: Option<Ticket>,
    last: Class,
    arrivals: u64,
    bound: usize,
    age: Duration,
}

const INTERACTIVE: usize = Class::Interactive as usize;
/// Those behind the first look so often whether it still comes for its turn.
const PATROL: Duration = Duration::from_secs(1);

impl Flow {
    pub(super) fn new(bucket: Bucket, bound: usize, age: Duration) -> Self {
        let (lines, served) = (Default::default(), BTreeMap::new());
        Flow { bucket, lines, served, keeper: None, last: Class::Batch, arrivals: 0, bound, age }
    }

    pub(super) fn configure(&mut self, rate: u64, burst: u64, bound: usize, age: Duration) {
        self.bucket.configure(rate, burst);
        (self.bound, self.age) = (bound, age);
    }

    /// What there is and what is needed, for a fleet that shares the rate.
    #[cfg(feature = "store")]
    pub(in crate::provider) fn look(&mut self, now: Time) -> Asked {
        self.bucket.pay_back(now);
        let waiting = self.lines.iter().map(Line::tokens).sum::<u128>();
        let first = self.next(now).and_then(|next| {
            let waiter = self.lines[next.class as usize].waiters.get(&next.number)?;
            Some(waiter.cost)
        });
        let wallet = self.bucket.wallet.unwrap_or_default();
        Asked {
            spent: mem::take(&mut self.bucket.spent),
            holds: wallet.holds(now),
            owes: wallet.owes(),
            waiting: u64::try_from(waiting).unwrap_or(u64::MAX),
            first: first.unwrap_or_default().min(self.bucket.burst),
            burst: self.bucket.burst,
        }
    }

    /// Takes out what is not needed.
    #[cfg(feature = "store")]
    pub(in crate::provider) fn surplus(&mut self, now: Time, keep: u64) -> u64 {
        self.bucket.wallet.as_mut().map_or(0, |wallet| wallet.surplus(now, keep))
    }

    /// A chunk came; `share` is what this process may expect a minute, `burst` the most at once over all members. (Where
    /// they were told different ones, a call that costs more would wait for what never comes.)
    #[cfg(feature = "store")]
    pub(in crate::provider) fn fill(&mut self, now: Time, amount: u64, until: Time, share: u64, burst: u64) {
        self.bucket.fill(now, amount, until);
        self.bucket.configure(share, burst);
    }

    /// The store is lost.
    #[cfg(feature = "store")]
    pub(in crate::provider) fn fend(&mut self, now: Time, share: u64) {
        self.bucket.fend(now, share);
    }

    pub(super) fn waiting(&self) -> usize {
        self.lines.iter().map(|line| line.waiters.len()).sum()
    }

    /// Takes the tokens if they are there and nobody waits for them.
    pub(super) fn try_take(&mut self, now: Time, cost: u64) -> bool {
        self.bucket.pay_back(now);
        let fits = self.waiting() == 0 && self.bucket.fits(cost);
        if fits {
            self.bucket.take(cost);
        }
        fits
    }

    /// Takes them, whether they are there or not.
    pub(super) fn take(&mut self, now: Time, cost: u64) {
        self.bucket.pay_back(now);
        self.bucket.take(cost);
    }

    /// When a newcomer would be served: as early as can be, and as far as one can tell.
    pub(super) fn outlook(&mut self, now: Time, class: Class, cost: u64) -> (Time, Time) {
        self.bucket.pay_back(now);
        let own = self.lines[class as usize].tokens();
        let pressing = if class == Class::Batch { self.lines[INTERACTIVE].tokens() } else { 0 };
        (self.bucket.ready_at(own, cost), self.bucket.ready_at(own + pressing, cost))
    }

    /// Joins the line; none if it is full.
    pub(super) fn join(&mut self, now: Time, class: Class, cost: u64) -> Option<Ticket> {
        if self.waiting() >= self.bound {
            return None;
        }
        let number = self.arrivals;
        self.arrivals += 1;
        let line = &mut self.lines[class as usize];
        line.waiters.insert(number, Waiter { cost, since: now, before: line.came, waker: None });
        line.came += u128::from(cost);
        Some(Ticket { number, class })
    }

    fn next(&self, now: Time) -> Option<Ticket> {
        let first = |class: Class| {
            let (number, waiter) = self.lines[class as usize].waiters.first_key_value()?;
            Some((Ticket { number: *number, class }, waiter.since))
        };
        match (first(Class::Interactive), first(Class::Batch)) {
            (Some(_), Some((batch, since)))
                if self.last == Class::Interactive && now.saturating_since(since) > self.age =>
            {
                Some(batch)
            }
            (Some((next, _)), _) | (None, Some((next, _))) => Some(next),
            (None, None) => None,
        }
    }

    /// Serves whom it can. The wakers are to be woken after the lock: of those, and of the next, who has to
    /// set its timer anew if the first has changed, or (`news`) the debt.
    pub(super) fn serve(&mut self, now: Time, mut news: bool) -> Vec<Waker> {
        self.bucket.pay_back(now);
        let mut wakers = Vec::new();
        while let Some(next) = self.next(now) {
            let line = &mut self.lines[next.class as usize];
            let Some(waiter) = line.waiters.get_mut(&next.number) else { break };
            let fits = self.bucket.fits(waiter.cost);
            if fits || news || self.keeper != Some(next) {
                wakers.extend(waiter.waker.take());
            }
            if !fits {
                break;
            }
            news = true;
            self.bucket.take(waiter.cost);
            self.last = next.class;
            if let Some(waiter) = line.remove(next.number) {
                self.served.insert(next.number, waiter.cost);
            }
        }
        wakers
    }

    /// A waiter asks; `waker` is kept if it has to wait. With the answer come wakers, to be woken after the
    /// lock.
    pub(super) fn ask(&mut self, ticket: Ticket, now: Time, waker: &Waker) -> (Claim, Vec<Waker>) {
        let own = self.lines[ticket.class as usize].waiters.get_mut(&ticket.number);
        // It does not wake itself.
        let own = own.and_then(|waiter| waiter.waker.take());
        let wakers = self.serve(now, false);
        let waker = own.filter(|own| own.will_wake(waker)).unwrap_or_else(|| waker.clone());
        (self.claim(ticket, now, waker), wakers)
    }

    fn claim(&mut self, ticket: Ticket, now: Time, waker: Waker) -> Claim {
        if self.served.remove(&ticket.number).is_some() {
            return Claim::Got;
        }
        let is_first = self.next(now) == Some(ticket);
        let line = &mut self.lines[ticket.class as usize];
        let gone = line.gone;
        let Some(waiter) = line.waiters.get_mut(&ticket.number) else {
            // Not possible: who is neither served nor in line has no ticket.
            return Claim::Wait { again_at: Time::MAX, at_least: Time::MAX };
        };
        waiter.waker = Some(waker);
        if is_first {
            self.keeper = Some(ticket);
        }
        // Those who left from behind it count too: as early as can be, and not later.
        let ahead = if is_first { 0 } else { waiter.before.saturating_sub(gone) };
        let at_least = self.bucket.ready_at(ahead, waiter.cost);
        let again_at = if is_first { at_least } else { at_least.max(now.saturating_add(PATROL)) };
        Claim::Wait { again_at, at_least }
    }

    /// A waiter leaves, served or not. Its waker is to be dropped after the lock.
    pub(super) fn leave(&mut self, now: Time, ticket: Ticket) -> Option<Waker> {
        if let Some(cost) = self.served.remove(&ticket.number) {
            self.settle(now, cost, 0);
            return None;
        }
        self.lines[ticket.class as usize].remove(ticket.number)?.waker
    }

    /// A call that took `reserved` has used `used`. What it took too much is there for others, what it took
    /// too little is paid back before anybody else is served.
    pub(super) fn settle(&mut self, now: Time, reserved: u64, used: u64) {
        self.bucket.pay_back(now);
        self.bucket.give_back(reserved.saturating_sub(used));
        self.bucket.take(used.saturating_sub(reserved));
    }

    /// All wakers, for when the rules have changed.
    pub(super) fn wakers(&mut self) -> Vec<Waker> {
        let all = self.lines.iter_mut().flat_map(|line| line.waiters.values_mut());
        all.filter_map(|waiter| mem::take(&mut waiter.waker)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn at(nanos: u64) -> Time {
        Time::from_nanos(nanos)
    }
    const SECOND: u64 = 1_000_000_000;

    fn flow(rate: u64, burst: u64) -> Flow {
        Flow::new(Bucket::new(rate, burst), 100, Duration::from_secs(5))
    }

    fn claim(flow: &mut Flow, ticket: Ticket, now: Time) -> Claim {
        flow.ask(ticket, now, Waker::noop()).0
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        // One token a second.
        let mut flow = flow(60, 10);
        assert!(flow.try_take(at(0), 10));
        assert!(!flow.try_take(at(0), 1));
        assert!(!flow.try_take(at(SECOND - 1), 1));
        assert!(flow.try_take(at(SECOND), 1));
        assert!(!flow.try_take(at(3 * SECOND - 1), 2));
        assert!(flow.try_take(at(3 * SECOND), 2));
        // Idle for a day: a burst, and no more.
        assert!(flow.try_take(at(86_400 * SECOND), 10));
        assert!(!flow.try_take(at(86_400 * SECOND), 1));
    }

    // brandur/redis-cell#50: 1000 for 1000 a minute never limited.
    #[test]
    fn large_rates_limit_too() {
        for rate in [1_000, 1_000_000, u64::from(u32::MAX)] {
            let mut flow = flow(rate, rate);
            assert!(flow.try_take(at(0), rate));
            let next = 60 * SECOND.div_ceil(rate);
            assert!(!flow.try_take(at((60 * SECOND).div_ceil(rate) - 1), 1), "{rate}");
            assert!(flow.try_take(at(next), 1), "{rate}");
        }
    }

    #[test]
    fn debt_is_paid_back_before_anybody_is_served() {
        let mut flow = flow(60, 10);
        assert!(flow.try_take(at(0), 4));
        flow.settle(at(SECOND), 4, 34);
        // 33 are owed: the next token is there when 24 of them are paid.
        assert!(!flow.try_take(at(25 * SECOND - 1), 1));
        assert!(flow.try_take(at(25 * SECOND), 1));
    }

    #[test]
    fn a_reply_that_cannot_be_believed_does_not_close_the_bucket_for_years() {
        for used in [1_000_000_000, u64::MAX] {
            let mut flow = flow(60, 10);
            for _ in 0..3 {
                assert!(flow.try_take(flow.bucket.at, 1));
                for _ in 0..3 {
                    flow.settle(flow.bucket.at, 1, used);
                }
                let day = flow.bucket.at.saturating_add(LONGEST);
                assert!(!flow.try_take(day, 1), "{used}");
                assert!(flow.try_take(day.saturating_add(Duration::from_secs(10)), 10), "{used}");
                flow.bucket.pay_back(flow.bucket.at.saturating_add(LONGEST));
            }
        }
    }

    #[test]
    fn what_was_not_used_is_there_for_others() {
        let mut flow = flow(60, 10);
        assert!(flow.try_take(at(0), 10));
        let ticket = flow.join(at(0), Class::Interactive, 5).unwrap();
        assert!(
            matches!(claim(&mut flow, ticket, at(0)), Claim::Wait { again_at, .. } if again_at == at(5 * SECOND))
        );
        flow.settle(at(SECOND), 10, 6);
        assert_eq!(claim(&mut flow, ticket, at(SECOND)), Claim::Got);
    }

    #[test]
    fn people_first_batch_in_turns_once_it_is_old_and_large_calls_are_not_passed() {
        let mut flow = flow(60, 10);
        assert!(flow.try_take(at(0), 10));
        let batch = flow.join(at(0), Class::Batch, 10).unwrap();
        let first = flow.join(at(0), Class::Interactive, 8).unwrap();
        let second = flow.join(at(0), Class::Interactive, 1).unwrap();
        let third = flow.join(at(0), Class::Interactive, 1).unwrap();
        assert!(!flow.try_take(at(5 * SECOND), 1), "nobody passes those who wait");
        assert!(matches!(claim(&mut flow, second, at(5 * SECOND)), Claim::Wait { .. }));
        assert_eq!(claim(&mut flow, first, at(8 * SECOND)), Claim::Got);
        // The batch waiter is old: its turn comes between two interactive ones, and it needs a full bucket.
        assert!(matches!(claim(&mut flow, second, at(9 * SECOND)), Claim::Wait { .. }));
        assert_eq!(claim(&mut flow, batch, at(18 * SECOND)), Claim::Got);
        assert_eq!(claim(&mut flow, second, at(19 * SECOND)), Claim::Got);
        assert_eq!(claim(&mut flow, third, at(20 * SECOND)), Claim::Got);
        assert_eq!(flow.waiting(), 0);
    }

    #[test]
    fn who_becomes_the_first_by_its_age_is_woken_to_set_its_timer() {
        struct Woken(std::sync::atomic::AtomicUsize);
        impl std::task::Wake for Woken {
            fn wake(self: std::sync::Arc<Self>) {
                self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
        }
        let woken = std::sync::Arc::new(Woken(0.into()));
        let wakes = || woken.0.load(std::sync::atomic::Ordering::SeqCst);
        let mut flow = flow(60, 10);
        assert!(flow.try_take(at(0), 10));
        let [first, second] = [0; 2].map(|_| flow.join(at(0), Class::Interactive, 4).unwrap());
        let batch = flow.join(at(0), Class::Batch, 8).unwrap();
        assert!(matches!(flow.ask(batch, at(0), &woken.clone().into()), (Claim::Wait { .. }, _)));
        assert_eq!(claim(&mut flow, first, at(4 * SECOND)), Claim::Got);
        assert!(
            matches!(claim(&mut flow, second, at(4 * SECOND)), Claim::Wait { again_at, .. } if again_at == at(8 * SECOND))
        );
        assert_eq!(wakes(), 0);
        // It would be served now, if the other had not become old meanwhile.
        let (asked, wakers) = flow.ask(second, at(8 * SECOND), Waker::noop());
        assert!(matches!(asked, Claim::Wait { .. }));
        wakers.into_iter().for_each(Waker::wake);
        assert_eq!(wakes(), 1);
        assert!(
            matches!(claim(&mut flow, batch, at(8 * SECOND)), Claim::Wait { again_at, .. } if again_at == at(12 * SECOND))
        );
        assert!(flow.ask(second, at(9 * SECOND), Waker::noop()).1.is_empty(), "once");
    }

    #[test]
    fn who_is_served_and_leaves_gives_it_back() {
        let mut flow = flow(60, 10);
        assert!(flow.try_take(at(0), 10));
        let gone = flow.join(at(0), Class::Interactive, 10).unwrap();
        let next = flow.join(at(0), Class::Interactive, 10).unwrap();
        drop(flow.serve(at(10 * SECOND), true));
        flow.leave(at(11 * SECOND), gone);
        assert_eq!(claim(&mut flow, next, at(11 * SECOND)), Claim::Got);
    }

    #[test]
    fn a_full_line_takes_nobody() {
        let mut flow = Flow::new(Bucket::new(60, 1), 2, Duration::ZERO);
        assert!(flow.join(at(0), Class::Batch, 1).is_some() && flow.join(at(0), Class::Batch, 1).is_some());
        assert!(flow.join(at(0), Class::Interactive, 1).is_none());
    }

    #[derive(Clone, Debug)]
    struct Call {
        after: u64,
        cost: u64,
        used: u64,
        batch: bool,
        leaves: bool,
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let call = (0..20 * SECOND, 0..=100_u64, 0..200_u64, any::<bool>(), prop::bool::weighted(0.2));
        let call =
            call.prop_map(|(after, cost, used, batch, leaves)| Call { after, cost, used, batch, leaves });
        prop::collection::vec(call, 1..40)
    }

    proptest! {
        /// A call that finds no tokens is refused until precisely the instant it was promised.
        #[test]
        fn the_promised_instant_is_exact(rate in 1..=10_000_000_u64, burst in 1..=100_000_u64, costs in prop::collection::vec((1..=100_000_u64, 0..SECOND), 1..30)) {
            let mut flow = flow(rate, burst);
            let mut now = 0;
            for (cost, after) in costs {
                let cost = cost.min(burst);
                now += after;
                if !flow.try_take(at(now), cost) {
                    let (promised, _) = flow.outlook(at(now), Class::Interactive, cost);
                    prop_assert!(promised > at(now));
                    prop_assert!(!flow.try_take(at(promised.as_nanos() - 1), cost));
                    prop_assert!(flow.try_take(promised, cost));
                    now = promised.as_nanos();
                }
            }
        }

        /// Over every window, what was used is no more than the rate, the burst, and what the estimates of
        /// its calls fell short by; each waiter is served; and in the end nothing is owed for ever.
        #[test]
        fn over_any_window_no_more_than_rate_and_burst(calls in calls(), rate in 60..=600_u64, patrols: bool) {
            const BURST: u64 = 100;
            let mut flow = flow(rate, BURST);
            let mut now = 0;
            let mut sent: Vec<(u64, u64, u64)> = Vec::new();
            let mut waiting: Vec<(Ticket, Call)> = Vec::new();
            let send = |flow: &mut Flow, sent: &mut Vec<(u64, u64, u64)>, now: u64, call: &Call| {
                sent.push((now, call.used, call.used.saturating_sub(call.cost)));
                flow.settle(at(now), call.cost, call.used);
            };
            let calls_made = calls.len();
            let mut left = 0;
            let come = |flow: &mut Flow, waiting: &mut Vec<(Ticket, Call)>, sent: &mut Vec<(u64, u64, u64)>, now: u64| {
                let mut i = 0;
                while i < waiting.len() {
                    // Whoever asks, all are served whose time has come: one before it, perhaps.
                    match flow.ask(waiting[i].0, at(now), Waker::noop()).0 {
                        Claim::Got => {
                            let (_, call) = waiting.remove(i);
                            send(flow, sent, now, &call);
                            i = 0;
                        }
                        Claim::Wait { again_at, at_least } => {
                            assert!(at_least <= again_at);
                            i += 1;
                        }
                    }
                }
            };
            for call in calls {
                now += call.after;
                if patrols {
                    come(&mut flow, &mut waiting, &mut sent, now);
                }
                if flow.try_take(at(now), call.cost) {
                    send(&mut flow, &mut sent, now, &call);
                    continue;
                }
                let class = if call.batch { Class::Batch } else { Class::Interactive };
                let ticket = flow.join(at(now), class, call.cost).unwrap();
                if call.leaves {
                    flow.leave(at(now), ticket);
                    left += 1;
                } else {
                    waiting.push((ticket, call));
                }
            }
            while !waiting.is_empty() {
                let before = waiting.len();
                let first = flow.next(at(now));
                if let Some(first) = first {
                    let cost = flow.lines[first.class as usize].waiters[&first.number].cost;
                    now = now.max(flow.bucket.ready_at(0, cost).as_nanos());
                }
                come(&mut flow, &mut waiting, &mut sent, now);
                // Or it has come to the turn of one that is old by now.
                let is_served = waiting.len() < before;
                prop_assert!(is_served || flow.next(at(now)) != first, "the first in line is served at its instant");
            }
            prop_assert_eq!(sent.len() + left, calls_made);
            prop_assert!(flow.served.is_empty() && flow.waiting() == 0);
            prop_assert!(flow.lines.iter().all(|line| line.tokens() == 0));
            for (i, (from, ..)) in sent.iter().enumerate() {
                let (mut used, mut over) = (0, 0);
                for (to, tokens, short) in &sent[i..] {
                    used += u128::from(*tokens);
                    over += u128::from(*short);
                    let flows = u128::from(to - from) * u128::from(rate);
                    prop_assert!(used * TOKEN <= flows + (u128::from(BURST) + over) * TOKEN);
                }
            }
        }
    }
}
