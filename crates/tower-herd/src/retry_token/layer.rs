use super::{ErrorsFail, NoDefer, RetryToken, Schedule, Tokens};
use crate::Switch;
use tower_layer::Layer;

/// Runs a job only when its token allows. See the [module](super).
#[derive(Clone, Debug)]
pub struct RetryTokenLayer<T, K, A, D = NoDefer, J = ErrorsFail> {
    pub(super) tokens: Tokens<T>,
    pub(super) key: K,
    pub(super) attempt: A,
    pub(super) schedule: Schedule,
    pub(super) switch: Switch,
    pub(super) defer: D,
    pub(super) judge: J,
}

impl<T, K, A> RetryTokenLayer<T, K, A> {
    /// With the tokens of this store. Two functions read the job:
    ///
    /// - `key`: what must not run twice within a wait, the same in all processes: the kind of the job and what it is
    ///   about, not the id of one trigger. None: the job passes untouched.
    /// - `attempt`: which attempt this is, counted from 1, as the queue counts. It is asked for one thing only, whether
    ///   this is the first: the waits grow by the store's own count.
    #[must_use]
    pub fn new(tokens: &Tokens<T>, key: K, attempt: A) -> Self {
        RetryTokenLayer {
            tokens: tokens.clone(),
            key,
            attempt,
            schedule: Schedule::default(),
            switch: Switch::default(),
            defer: NoDefer,
            judge: ErrorsFail,
        }
    }
}

impl<T, K, A, D, J> RetryTokenLayer<T, K, A, D, J> {
    /// How waits grow. Default: 2 s, doubling up to 10 min, plus or minus 30 %.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Puts jobs back. Default: nobody does; who gets the error must.
    #[must_use]
    pub fn defer<E>(self, defer: E) -> RetryTokenLayer<T, K, A, E, J> {
        let RetryTokenLayer { tokens, key, attempt, schedule, switch, defer: _, judge } = self;
        RetryTokenLayer { tokens, key, attempt, schedule, switch, defer, judge }
    }

    /// Says what came of a run. Default: a reply is a success, an error a failure, a refusal of ours neither.
    #[must_use]
    pub fn outcome<I>(self, judge: I) -> RetryTokenLayer<T, K, A, D, I> {
        let RetryTokenLayer { tokens, key, attempt, schedule, switch, defer, judge: _ } = self;
        RetryTokenLayer { tokens, key, attempt, schedule, switch, defer, judge }
    }

    /// Turned by this switch. Observed: keys are claimed and cleared, and a job that would be refused is counted and
    /// runs. Off: all run, and nothing is claimed.
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = switch.clone();
        self
    }
}

impl<S, T, K: Clone, A: Clone, D: Clone, J: Clone> Layer<S> for RetryTokenLayer<T, K, A, D, J> {
    type Service = RetryToken<S, T, K, A, D, J>;
    fn layer(&self, inner: S) -> Self::Service {
        let RetryTokenLayer { tokens, key, attempt, schedule, switch, defer, judge } = self;
        RetryToken {
            inner,
            layer: RetryTokenLayer {
                tokens: tokens.clone(),
                key: key.clone(),
                attempt: attempt.clone(),
                schedule: *schedule,
                switch: switch.clone(),
                defer: defer.clone(),
                judge: judge.clone(),
            },
        }
    }
}
