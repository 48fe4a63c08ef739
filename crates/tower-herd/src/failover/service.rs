use super::{LadderError, ResponseFuture, Rung, future, patience::Patience, rung::check};
use crate::{
    BoxError, Classify, HasTask, Key, Switch, Task,
    classify::DefaultClassify,
    provider::{Denied, Slot},
    random::mix,
    retry::{Budget, CloneRequest, Resend},
};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower_service::Service;

/// A ladder over services. See the [module](super).
pub struct HashedFailover<S, Req, R = CloneRequest, C = DefaultClassify> {
    pub(super) ladder: Arc<Ladder<S, Req>>,
    pub(super) resend: R,
    pub(super) classify: C,
}

/// What all clones share.
pub(super) struct Ladder<S, Req> {
    // Behind a mutex that is held to take one out or to put one back, never across a call.
    pub(super) rungs: Box<[Rung<Mutex<Stock<S>>, Req>]>,
    pub(super) patience: Patience,
    pub(super) switch: Switch,
    name: Arc<str>,
    untasked: AtomicU64,
}

/// The services of a rung that nobody is calling.
pub(super) struct Stock<S> {
    /// Cloned for each call; neither polled nor called itself.
    model: S,
    /// A clone that has made its call. Whoever takes it polls it ready again before the next one, like
    /// every caller that keeps its service; so a boxed service need not be cloned for each call.
    spare: Option<S>,
}

impl<S> Stock<S> {
    fn new(model: S) -> Mutex<Self> {
        Mutex::new(Stock { model, spare: None })
    }
}

impl<S, Req> HashedFailover<S, Req> {
    /// A ladder of these rungs, for HTTP requests that can be cloned.
    pub fn new(rungs: impl IntoIterator<Item = Rung<S, Req>>) -> Result<Self, LadderError> {
        let rungs: Vec<_> = rungs.into_iter().collect();
        check(&rungs)?;
        let switch = Switch::default();
        Ok(HashedFailover::build(
            rungs,
            Patience::default(),
            switch,
            CloneRequest,
            DefaultClassify::default(),
        ))
    }
}

impl<S, Req, R, C> HashedFailover<S, Req, R, C> {
    /// How long a task waits for a slot in one tier before it also queues at the next. Default 500 ms.
    #[must_use]
    pub fn slot_patience(self, patience: Duration) -> Self
    where
        S: Clone,
    {
        let patience = Patience { slot: patience, ..self.ladder.patience };
        self.change(|ladder| ladder.patience = patience)
    }

    /// Up to which wait a pause is sat out instead of left for the next tier. Default 2 s.
    #[must_use]
    pub fn hint_patience(self, patience: Duration) -> Self
    where
        S: Clone,
    {
        let patience = Patience { hint: patience, ..self.ladder.patience };
        self.change(|ladder| ladder.patience = patience)
    }

    /// Whether it walks, only counts who would have left the first rung, or stands aside. See the
    /// [module](super#switched).
    #[must_use]
    pub fn switch(self, switch: &Switch) -> Self
    where
        S: Clone,
    {
        self.change(|ladder| ladder.switch = switch.clone())
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.ladder.switch
    }

    fn change(self, change: impl FnOnce(&mut Ladder<S, Req>)) -> Self
    where
        S: Clone,
    {
        let old = &self.ladder;
        let rungs = old.rungs.iter().map(|rung| rung.with(Stock::new(copy(&rung.with)))).collect();
        let mut ladder = Ladder::new(rungs, old.patience, old.switch.clone());
        change(&mut ladder);
        HashedFailover { ladder: Arc::new(ladder), ..self }
    }

    /// The retry budget of the layer above, so that it is kept by provider: a rung's first calls pay
    /// into its part, and a repetition that goes to another rung than the one it was charged to gets
    /// its charge back. Default: one pot for all, in which the retry layer counts by itself.
    #[must_use]
    pub fn budget(self, budget: &dyn Budget) -> Self
    where
        S: Clone,
    {
        self.change(|ladder| {
            for rung in &mut ladder.rungs {
                rung.pot = budget.open(rung.provider.name());
            }
        })
    }

    /// How a request is kept for the next rung.
    #[must_use]
    pub fn resend<R2>(self, resend: R2) -> HashedFailover<S, Req, R2, C> {
        HashedFailover { ladder: self.ladder, resend, classify: self.classify }
    }

    /// With another classifier.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> HashedFailover<S, Req, R, D> {
        HashedFailover { ladder: self.ladder, resend: self.resend, classify }
    }
}

impl<S, Req, R, C> HashedFailover<S, Req, R, C> {
    pub(super) fn build(
        rungs: impl IntoIterator<Item = Rung<S, Req>>,
        patience: Patience,
        switch: Switch,
        resend: R,
        classify: C,
    ) -> Self {
        let rungs = rungs.into_iter().map(|rung| rung.map_with(Stock::new)).collect();
        HashedFailover { ladder: Arc::new(Ladder::new(rungs, patience, switch)), resend, classify }
    }
}

fn copy<S: Clone>(stock: &Mutex<Stock<S>>) -> S {
    stock.lock().unwrap_or_else(PoisonError::into_inner).model.clone()
}

impl<S, Req> Ladder<S, Req> {
    fn new(rungs: Box<[Rung<Mutex<Stock<S>>, Req>]>, patience: Patience, switch: Switch) -> Self {
        Ladder { rungs, patience, switch, name: "ladder".into(), untasked: AtomicU64::new(0) }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// What a request hashes by. Without a task each goes its own way.
    pub(super) fn key(&self, task: Option<&Task>) -> Key {
        match task {
            Some(task) => task.affinity_key(),
            None => mix(self.untasked.fetch_add(1, Ordering::Relaxed)).into(),
        }
    }

    /// A service of this rung, not ready yet.
    pub(super) fn service(&self, rung: usize) -> S
    where
        S: Clone,
    {
        let mut stock = self.rungs[rung].with.lock().unwrap_or_else(PoisonError::into_inner);
        match stock.spare.take() {
            Some(spare) => spare,
            None => stock.model.clone(),
        }
    }

    /// Keeps a service that has just made its call, so that nothing it was polled ready for is left in it.
    pub(super) fn keep(&self, rung: usize, service: S) {
        let mut stock = self.rungs[rung].with.lock().unwrap_or_else(PoisonError::into_inner);
        let surplus = stock.spare.replace(service);
        drop(stock);
        // Whatever its drop does, it does it without the lock.
        drop(surplus);
    }

    /// The bits of all rungs outside the idempotency domain of this provider; none if it has no rung here.
    pub(super) fn all_but(&self, provider: &str) -> u64 {
        let rungs = self.rungs.iter().enumerate();
        let homes = rungs.filter(|(_, rung)| **rung.provider.name() == *provider);
        homes.fold(0, |bits, (i, _)| bits | self.outside(i))
    }

    /// The bits of all rungs that do not share their idempotency keys with this one.
    pub(super) fn outside(&self, home: usize) -> u64 {
        let home = &self.rungs[home];
        let rungs = self.rungs.iter().enumerate().filter(|(_, rung)| !home.shares_keys_with(rung));
        rungs.fold(0, |bits, (i, _)| bits | 1 << i)
    }

    /// Whether its rungs are of more than one idempotency domain.
    pub(super) fn is_of_several(&self) -> bool {
        self.outside(0) != 0
    }

    /// The next rung after those in `done` (a bit a rung), in the order of this key.
    pub(super) fn next(&self, key: Key, done: u64) -> Option<usize> {
        let left = self.rungs.iter().enumerate().filter(|(i, _)| done & (1 << i) == 0);
        let tier = left.clone().map(|(_, rung)| rung.tier).min()?;
        let mut best: Option<(usize, f64)> = None;
        for (i, rung) in left.filter(|(_, rung)| rung.tier == tier) {
            let score = rung.score(key);
            if best.is_none_or(|(_, most)| score > most) {
                best = Some((i, score));
            }
        }
        best.map(|(i, _)| i)
    }

    /// The first rung in the tier of the next one with a free slot for a call with this deadline; else the
    /// rungs of that tier.
    pub(super) fn try_tier(&self, key: Key, done: u64, end: Option<Instant>) -> Result<(usize, Slot), u64> {
        let mut looked = 0u64;
        let mut tier = None;
        while let Some(i) = self.next(key, done | looked) {
            let rung = &self.rungs[i];
            if *tier.get_or_insert(rung.tier) != rung.tier {
                break;
            }
            // Who is not back there yet takes none of its slots.
            if rung.provider.bars_until(key).is_none() {
                match rung.provider.try_slot(|| end) {
                    Ok(slot) => return Ok((i, slot)),
                    Err(Denied::Paused(..) | Denied::NoSlot) => {}
                }
            }
            looked |= 1 << i;
        }
        Err(looked)
    }

    /// The first rung with a free slot in any tier.
    pub(super) fn try_all(&self, key: Key, mut done: u64, end: Option<Instant>) -> Option<(usize, Slot)> {
        loop {
            match self.try_tier(key, done, end) {
                Ok(found) => return Some(found),
                Err(0) => return None,
                Err(looked) => done |= looked,
            }
        }
    }
}

impl<S, Req, R: Clone, C: Clone> Clone for HashedFailover<S, Req, R, C> {
    fn clone(&self) -> Self {
        HashedFailover {
            ladder: self.ladder.clone(),
            resend: self.resend.clone(),
            classify: self.classify.clone(),
        }
    }
}

impl<S, Req, R, C> fmt::Debug for HashedFailover<S, Req, R, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HashedFailover")
            .field("rungs", &self.ladder.rungs)
            .field("patience", &self.ladder.patience)
            .field("switch", &self.ladder.switch)
            .finish_non_exhaustive()
    }
}

impl<S, Req, R, C> Service<Req> for HashedFailover<S, Req, R, C>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    R: Resend<Req> + Clone,
    C: Classify<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, R, C>;

    /// Always ready: which rung a request goes to depends on the request.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let mode = self.ladder.switch.mode();
        future::walk(&self.ladder, request, self.resend.clone(), self.classify.clone(), mode)
    }
}
