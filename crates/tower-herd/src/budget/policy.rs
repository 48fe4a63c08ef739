use std::sync::Arc;

/// What a repetition is asked of. Shared by every layer that repeats calls to the same provider; also
/// by retry code that is not ours. Never blocks.
///
/// Who repeats calls keeps four rules, as [`JitteredRetryLayer`](crate::JitteredRetryLayer) does:
/// [`deposit`](Budget::deposit) once for each original request, however many layers share the budget;
/// [`try_withdraw`](Budget::try_withdraw) when a repetition is scheduled, *before* the wait, and none
/// without it; [`refund`](Budget::refund) if that repetition is not sent after all; and, where the
/// budget [`listens`](Budget::listens), tell it what became of each call.
///
/// ```
/// use tower_herd::budget::{Budget, RatioBudget};
///
/// fn call_with_one_retry(budget: &RatioBudget, mut call: impl FnMut() -> Result<u32, ()>) -> Result<u32, ()> {
///     budget.deposit();
///     match call() {
///         Err(()) if budget.try_withdraw() => call(), // after a wait with jitter
///         outcome => outcome,
///     }
/// }
/// let budget = RatioBudget::new(0.1); // clones are the same budget: the layers get one too
/// let dead = (0..100).map(|_| {
///     let mut calls = 0;
///     let _ = call_with_one_retry(&budget, || { calls += 1; Err(()) });
///     calls
/// });
/// assert_eq!(dead.sum::<u32>(), 100 + 10 + 3);
/// ```
///
/// With tower's own retry: `examples/foreign_retry.rs`.
pub trait Budget: Send + Sync + 'static {
    /// One original request is sent (not a repetition).
    fn deposit(&self);
    /// Takes out one call. Asked when a repetition is scheduled, before the wait; on `false` none is
    /// sent.
    #[must_use]
    fn try_withdraw(&self) -> bool;
    /// A call that was taken out is not sent after all.
    fn refund(&self);
    /// A request that was paid in for turned out to be given up further in (its reply bears the mark of
    /// [`Classify::exhausted`](crate::Classify::exhausted)): it pays for no repetition. The default lets
    /// the payment stand.
    fn take_back(&self) {}
    /// Opens the part that is kept for one provider, where one handle serves a ladder of several; none:
    /// one pot for all. A layer that knows where a call goes (the ladder) does so once for each rung,
    /// and deposits there.
    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let _ = provider;
        None
    }
    /// The part of this provider, if somebody opened it. The retry layer withdraws from the part of
    /// the provider whose reply it holds, else from the one pot: a part into which nobody pays would
    /// soon be empty.
    fn of(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let _ = provider;
        None
    }
    /// Whether it goes by what becomes of calls, and wants [`succeeded`](Budget::succeeded) and
    /// [`failed`](Budget::failed) to be called. Asked once, when a layer is built.
    fn listens(&self) -> bool {
        false
    }
    /// An original request came to a success, after however many attempts.
    fn succeeded(&self) {}
    /// A call came to something after which it could be sent again at the budget's cost, or the server
    /// forbade it to be sent again. Called before [`try_withdraw`](Budget::try_withdraw). A 429 that may
    /// be delivered again is neither: that is flow control.
    fn failed(&self) {}
    /// Tells pots apart: two handles of one pot give the same number, so that a task that passes two
    /// layers of one budget deposits once (twitter/finagle#956).
    fn id(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }
}

impl<B: Budget + ?Sized> Budget for Arc<B> {
    fn deposit(&self) {
        (**self).deposit();
    }
    fn try_withdraw(&self) -> bool {
        (**self).try_withdraw()
    }
    fn refund(&self) {
        (**self).refund();
    }
    fn take_back(&self) {
        (**self).take_back();
    }
    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        (**self).open(provider)
    }
    fn of(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        (**self).of(provider)
    }
    fn listens(&self) -> bool {
        (**self).listens()
    }
    fn succeeded(&self) {
        (**self).succeeded();
    }
    fn failed(&self) {
        (**self).failed();
    }
    fn id(&self) -> usize {
        (**self).id()
    }
}

/// No limit but the attempts of each request. For tests, and where something else holds the share of
/// repetitions down.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unlimited;

impl Budget for Unlimited {
    fn deposit(&self) {}
    fn try_withdraw(&self) -> bool {
        true
    }
    fn refund(&self) {}
}
