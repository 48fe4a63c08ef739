//! What may be spent, shared by all that spend it: exact under concurrency, and for trees of tasks.
//!
//! The root of a tree is one atomic number, changed by compare-and-exchange. A child's part is checked
//! under the tree's lock, and then the root decides: a "no" of the root leaves nothing to be taken back, so
//! nobody is refused for the sake of a reservation that came to nothing.

use super::Amount;
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
};

/// A spend allowance: what a task, and all that it starts, may spend. A handle: clones are the same one.
///
/// A call takes its estimate out before it is sent, and puts back what it did not use: so five calls at
/// once, of 0.15 each, find 0.45 enough for three, and not for five (BerriAI/litellm#34732). What costs
/// more than its estimate is charged whole all the same: the allowance may end below zero, and then nothing
/// more is sent.
///
/// A [`child`](Allowance::child) has a limit of its own and draws on its parent as well: however many
/// children there are, together they spend no more than the parent has (nodetool-ai/nodetool#5489).
///
/// ```
/// use tower_herd::spend::{Allowance, Amount};
///
/// let run = Allowance::new(Amount::units(10));
/// let step = run.child(Amount::units(3));
/// let call = step.reserve(Amount::units(2)).ok_or("refused")?;
/// assert_eq!((step.left(), run.left()), (Amount::units(1), Amount::units(8)));
/// call.settle(Amount::micros(500_000));
/// assert_eq!((step.spent(), run.spent()), (Amount::micros(500_000), Amount::micros(500_000)));
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone)]
pub struct Allowance(Arc<Node>);

struct Node {
    /// All that was ever granted.
    limit: AtomicU64,
    /// What is left; below zero after a call that cost more than it reserved.
    left: AtomicI64,
    parent: Option<Allowance>,
    /// The root's: held while reservations of its children are made.
    children: Mutex<()>,
}

impl Allowance {
    /// So much, and no more.
    #[must_use]
    pub fn new(limit: Amount) -> Self {
        Self::node(limit, None)
    }

    /// An allowance that draws on this one, and has a limit of its own.
    #[must_use]
    pub fn child(&self, limit: Amount) -> Self {
        Self::node(limit, Some(self.clone()))
    }

    fn node(limit: Amount, parent: Option<Allowance>) -> Self {
        let (left, limit) = (AtomicI64::new(limit.signed()), AtomicU64::new(limit.as_micros()));
        Allowance(Arc::new(Node { limit, left, parent, children: Mutex::default() }))
    }

    /// Grants more: for an allowance that is refilled by its owner, every day for instance.
    pub fn top_up(&self, more: Amount) {
        let raise = |limit: u64| Some((Amount::micros(limit) + more).as_micros());
        self.0.limit.fetch_update(Relaxed, Relaxed, raise).ok();
        self.0.give(more);
    }

    /// What may still be spent through it: the least that is left from here up to the root.
    #[must_use]
    pub fn left(&self) -> Amount {
        let least = self.line().map(|node| node.left.load(Relaxed)).min().unwrap_or_default();
        Amount::micros(u64::try_from(least).unwrap_or_default())
    }

    /// What was spent through it, and is reserved.
    #[must_use]
    pub fn spent(&self) -> Amount {
        let left = self.0.left.load(Relaxed);
        let limit = self.0.limit.load(Relaxed);
        Amount::micros(limit.saturating_add_signed(left.saturating_neg()))
    }

    /// What was ever granted.
    #[must_use]
    pub fn limit(&self) -> Amount {
        Amount::micros(self.0.limit.load(Relaxed))
    }

    /// Takes `amount` out, for a call that is about to be made; none if there is not so much left, here or
    /// further up. Nothing at all costs nothing, and still needs an allowance that is not overdrawn.
    #[must_use]
    pub fn reserve(&self, amount: Amount) -> Option<Reservation> {
        let granted = match &self.0.parent {
            None => self.0.take(amount),
            Some(_) => self.take_through(amount),
        };
        granted.then(|| Reservation { from: self.clone(), amount })
    }

    fn take_through(&self, amount: Amount) -> bool {
        let root = self.root();
        let _others = root.0.children.lock().unwrap_or_else(PoisonError::into_inner);
        // What is changed without the lock may only grow, or fall by a debt; neither admits too much.
        let nodes = || self.line().filter(|node| node.parent.is_some());
        if !nodes().all(|node| fits(node.left.load(Relaxed), amount)) || !root.0.take(amount) {
            return false;
        }
        nodes().for_each(|node| node.charge(amount));
        true
    }

    fn root(&self) -> &Allowance {
        let mut at = self;
        while let Some(parent) = &at.0.parent {
            at = parent;
        }
        at
    }

    /// From here to the root.
    fn line(&self) -> impl Iterator<Item = &Node> {
        std::iter::successors(Some(&*self.0), |node| node.parent.as_ref().map(|parent| &*parent.0))
    }
}

fn fits(left: i64, amount: Amount) -> bool {
    left >= amount.signed()
}

impl Node {
    #[inline]
    fn take(&self, amount: Amount) -> bool {
        let take = |left: i64| fits(left, amount).then(|| left - amount.signed());
        self.left.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    fn give(&self, amount: Amount) {
        self.left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_add(amount.signed()))).ok();
    }

    /// Takes it, whether it is there or not.
    fn charge(&self, amount: Amount) {
        self.left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(amount.signed()))).ok();
    }
}

/// What was taken out for one call. Dropped, it stays charged: nobody can tell what the call has cost.
#[must_use = "dropped, it stays charged"]
pub struct Reservation {
    from: Allowance,
    amount: Amount,
}

impl Reservation {
    /// What was reserved.
    #[must_use]
    pub fn amount(&self) -> Amount {
        self.amount
    }

    /// The call has cost this: more is charged, less is given back.
    pub fn settle(self, used: Amount) {
        let (more, less) = (used.saturating_sub(self.amount), self.amount.saturating_sub(used));
        for node in self.from.line() {
            if more > Amount::ZERO {
                node.charge(more);
            } else if less > Amount::ZERO {
                node.give(less);
            }
        }
    }

    /// The call was not executed: all is given back.
    pub fn refund(self) {
        self.settle(Amount::ZERO);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("amount", &self.amount).finish_non_exhaustive()
    }
}

impl fmt::Debug for Allowance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allowance")
            .field("limit", &self.limit())
            .field("spent", &self.spent())
            .field("left", &self.left())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicUsize;

    const fn u(units: u64) -> Amount {
        Amount::units(units)
    }

    #[test]
    fn debt_refuses_even_what_is_free() {
        let allowance = Allowance::new(u(1));
        allowance.reserve(u(1)).unwrap().settle(u(3));
        assert_eq!((allowance.left(), allowance.spent()), (Amount::ZERO, u(3)));
        assert!(allowance.reserve(Amount::ZERO).is_none());
        allowance.top_up(u(2));
        assert!(allowance.reserve(Amount::ZERO).is_some(), "the debt is paid");
        assert!(allowance.reserve(Amount::micros(1)).is_none());
        assert_eq!(allowance.limit(), u(3));
    }

    #[test]
    fn extremes_saturate() {
        let allowance = Allowance::new(Amount::MAX);
        for _ in 0..3 {
            allowance.reserve(Amount::ZERO).unwrap().settle(Amount::MAX);
            allowance.top_up(Amount::MAX);
        }
        assert!(allowance.spent() <= Amount::MAX && allowance.left() <= Amount::MAX);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Reserve { at: usize, amount: u64 },
        Settle { which: usize, used: u64 },
        Refund(usize),
        Drop(usize),
        TopUp { at: usize, more: u64 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..4_usize, 0..40_u64).prop_map(|(at, amount)| Step::Reserve { at, amount }),
            2 => (any::<usize>(), 0..60_u64).prop_map(|(which, used)| Step::Settle { which, used }),
            1 => any::<usize>().prop_map(Step::Refund),
            1 => any::<usize>().prop_map(Step::Drop),
            1 => (0..4_usize, 0..30_u64).prop_map(|(at, more)| Step::TopUp { at, more }),
        ];
        prop::collection::vec(step, 0..80)
    }

    proptest! {
        /// A root with two children and a grandchild, against plain sums.
        #[test]
        fn as_plain_sums_would(steps in steps(), limits: [u8; 4]) {
            let limit = |at: usize| u(limits[at].into());
            let root = Allowance::new(limit(0));
            let first = root.child(limit(1));
            let all = [root.clone(), first.clone(), root.child(limit(2)), first.child(limit(3))];
            let lines: [&[usize]; 4] = [&[0], &[1, 0], &[2, 0], &[3, 1, 0]];
            let mut left = limits.map(i64::from);
            let mut open = Vec::new();
            for step in steps {
                match step {
                    Step::Reserve { at, amount } => {
                        let fits = lines[at].iter().all(|node| left[*node] >= amount.cast_signed());
                        let got = all[at].reserve(u(amount));
                        prop_assert_eq!(got.is_some(), fits);
                        if let Some(got) = got {
                            lines[at].iter().for_each(|node| left[*node] -= amount.cast_signed());
                            open.push((at, amount.cast_signed(), got));
                        }
                    }
                    Step::Settle { which, used } if !open.is_empty() => {
                        let (at, amount, got) = open.swap_remove(which % open.len());
                        got.settle(u(used));
                        lines[at].iter().for_each(|node| left[*node] += amount - used.cast_signed());
                    }
                    Step::Refund(which) if !open.is_empty() => {
                        let (at, amount, got) = open.swap_remove(which % open.len());
                        got.refund();
                        lines[at].iter().for_each(|node| left[*node] += amount);
                    }
                    Step::Drop(which) if !open.is_empty() => drop(open.swap_remove(which % open.len())),
                    Step::TopUp { at, more } => {
                        all[at].top_up(u(more));
                        left[at] += more.cast_signed();
                    }
                    _ => {}
                }
                for (at, allowance) in all.iter().enumerate() {
                    let least = lines[at].iter().map(|node| left[*node]).min().unwrap_or_default();
                    prop_assert_eq!(allowance.left(), u(least.max(0).cast_unsigned()));
                }
            }
        }
    }

    /// Threads that all want as much as they can get: exactly what is there is granted, at each level,
    /// and nobody is refused while there is enough.
    #[test]
    fn threads_get_all_there_is_and_no_more() {
        for round in 0..50 {
            let root = Allowance::new(u(300));
            let children = [root.child(u(200)), root.child(u(200))];
            let granted: [AtomicUsize; 3] = Default::default();
            std::thread::scope(|scope| {
                for thread in 0..6 {
                    let (root, children, granted) = (&root, &children, &granted);
                    scope.spawn(move || {
                        let which = thread % 3;
                        let from = if which == 2 { root } else { &children[which] };
                        for call in 0..200 {
                            if let Some(got) = from.reserve(u(1)) {
                                if (call + round) % 3 == 0 {
                                    got.refund();
                                } else {
                                    granted[which].fetch_add(1, Relaxed);
                                    got.settle(u(1));
                                }
                            }
                        }
                    });
                }
            });
            // What is left can be had by one who comes alone.
            let [first, second, own] = granted.map(AtomicUsize::into_inner);
            let total = (first + second + own) as u64;
            assert!(total <= 300 && first <= 200 && second <= 200, "{first} {second} {own}");
            assert_eq!(root.left(), u(300 - total));
            assert_eq!(children[0].spent(), u(first as u64));
            assert_eq!(children[1].spent(), u(second as u64));
        }
    }

    /// Without refunds, nothing is left over either: a refusal is never the fault of a reservation that is
    /// on its way to be refused itself.
    #[test]
    fn threads_leave_nothing_over() {
        for _ in 0..50 {
            let root = Allowance::new(u(100));
            let child = root.child(u(1000));
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (root, child) = (&root, &child);
                    scope.spawn(move || {
                        for _ in 0..100 {
                            // Large ones that fail must not stand in the way of the small ones.
                            drop(if thread % 2 == 0 { child.reserve(u(1)) } else { root.reserve(u(2)) });
                            assert!(child.reserve(u(101)).is_none());
                        }
                    });
                }
            });
            assert_eq!((root.left(), root.spent()), (Amount::ZERO, u(100)));
        }
    }
}
