use super::{LadderError, hash};
use crate::{HasTask, Key, Provider, Task, retry::Budget};
use std::{fmt, sync::Arc};

/// What a rung does to a request before it goes there: its URL, its key, its model.
pub type MapRequest<Req> = Arc<dyn Fn(Req) -> Req + Send + Sync>;

/// One rung of a ladder: a provider, what its requests look like, and its layers (or its service).
///
/// ```
/// use tower_herd::{Fleet, failover::Rung};
///
/// let fleet = Fleet::local();
/// let cheap = Rung::new(&fleet.provider("cheap"), tower::layer::util::Identity::new())
///     .map(|mut request: http::Request<String>| {
///         *request.uri_mut() = http::Uri::from_static("http://cheap.example/v1/chat");
///         request
///     });
/// let dear = Rung::new(&fleet.provider("dear"), tower::layer::util::Identity::new()).tier(1).paid();
/// # let (_, _): (_, Rung<_, http::Request<String>>) = (cheap, dear);
/// ```
pub struct Rung<T, Req> {
    pub(crate) provider: Provider,
    pub(super) tier: u32,
    pub(super) weight: f64,
    pub(super) paid: bool,
    /// Who shares it knows the idempotency keys that this rung has seen.
    pub(super) domain: Option<Arc<str>>,
    pub(super) map: Option<MapRequest<Req>>,
    pub(crate) with: T,
    /// Its part of the retry budget.
    pub(super) pot: Option<Arc<dyn Budget>>,
    name_hash: u64,
}

impl<T, Req> Rung<T, Req> {
    /// A free rung in the first tier, of weight 1. `with`: its layers for
    /// [`HashedFailoverLayer`](super::HashedFailoverLayer), its service for
    /// [`HashedFailover`](super::HashedFailover).
    #[must_use]
    pub fn new(provider: &Provider, with: T) -> Self {
        Rung {
            provider: provider.clone(),
            tier: 0,
            weight: 1.0,
            paid: false,
            domain: None,
            map: None,
            with,
            pot: None,
            name_hash: hash::name_hash(&label(provider)),
        }
    }

    /// Its tier: lower ones are asked first.
    #[must_use]
    pub fn tier(mut self, tier: u32) -> Self {
        self.tier = tier;
        self
    }

    /// Its share of the tier's tasks, in proportion to the weights of the others.
    #[must_use]
    pub fn weight(mut self, weight: f64) -> Self {
        self.weight = weight;
        self
    }

    /// It costs money: an empty answer from it ends the chain.
    #[must_use]
    pub fn paid(mut self) -> Self {
        self.paid = true;
        self
    }

    /// The idempotency domain it belongs to: rungs with the same one share their idempotency keys, such as
    /// two regions of one payment account. A [`Keyed`](crate::Safety::Keyed) write that may have taken
    /// effect at one of them may be sent to another of them, if it belongs to a task; outside of the domain
    /// it is sent only on proof that nothing happened. Default: none, each provider is a domain of its own.
    #[must_use]
    pub fn domain(mut self, domain: impl Into<Arc<str>>) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// Whether an idempotency key that one of them has seen is known to the other.
    pub(super) fn shares_keys_with<U>(&self, other: &Rung<U, Req>) -> bool {
        *self.provider.name() == *other.provider.name()
            || (self.domain.is_some() && self.domain == other.domain)
    }

    /// Changes each request before it goes to this rung.
    #[must_use]
    pub fn map(mut self, map: impl Fn(Req) -> Req + Send + Sync + 'static) -> Self {
        self.map = Some(Arc::new(map));
        self
    }

    pub(super) fn with<U>(&self, with: U) -> Rung<U, Req> {
        Rung {
            provider: self.provider.clone(),
            tier: self.tier,
            weight: self.weight,
            paid: self.paid,
            domain: self.domain.clone(),
            map: self.map.clone(),
            with,
            pot: self.pot.clone(),
            name_hash: self.name_hash,
        }
    }

    pub(crate) fn map_with<U>(self, change: impl FnOnce(T) -> U) -> Rung<U, Req> {
        Rung {
            provider: self.provider,
            tier: self.tier,
            weight: self.weight,
            paid: self.paid,
            domain: self.domain,
            map: self.map,
            with: change(self.with),
            pot: self.pot,
            name_hash: self.name_hash,
        }
    }

    pub(super) fn score(&self, key: Key) -> f64 {
        hash::score(self.name_hash, self.weight, key)
    }
}

impl<T, Req: HasTask> Rung<T, Req> {
    /// The request is sent here: the retry budget is told. Whether it paid in.
    pub(super) fn sends(&self, task: Option<&Task>, request: &Req) -> bool {
        let resent = request.resent();
        if let Some(resent) = resent {
            resent.went_to(self.provider.name());
        }
        let Some(pot) = &self.pot else { return false };
        let first = match task {
            Some(task) => task.first_deposit(pot.id()),
            None => resent.is_none(),
        };
        if first {
            pot.deposit();
        }
        first
    }
}

/// What a part that goes by outcomes hears here: the retry layer sees neither where a success came from, nor
/// the failures that the walk went on from.
impl<T, Req> Rung<T, Req> {
    #[inline]
    pub(super) fn succeeded(&self) {
        if let Some(pot) = &self.pot {
            pot.succeeded();
        }
    }

    pub(super) fn failed(&self) {
        if let Some(pot) = &self.pot {
            pot.failed();
        }
    }
}

/// A rung's name: provider, and scope if it has one.
fn label(provider: &Provider) -> String {
    match provider.scope_name() {
        Some(scope) => format!("{}/{scope}", provider.name()),
        None => provider.name().to_string(),
    }
}

pub(super) fn check<T, Req>(rungs: &[Rung<T, Req>]) -> Result<(), LadderError> {
    if rungs.is_empty() {
        return Err(LadderError::Empty);
    }
    if rungs.len() > 64 {
        return Err(LadderError::TooMany(rungs.len()));
    }
    let mut names = std::collections::HashSet::new();
    for rung in rungs {
        let name = label(&rung.provider);
        if !(rung.weight > 0.0 && rung.weight.is_finite()) {
            return Err(LadderError::Weight { rung: name, weight: rung.weight });
        }
        if !names.insert(name.clone()) {
            return Err(LadderError::Twice(name));
        }
    }
    Ok(())
}

impl<T: Clone, Req> Clone for Rung<T, Req> {
    fn clone(&self) -> Self {
        self.with(self.with.clone())
    }
}

impl<T, Req> fmt::Debug for Rung<T, Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rung")
            .field("provider", &label(&self.provider))
            .field("tier", &self.tier)
            .field("weight", &self.weight)
            .field("paid", &self.paid)
            .field("domain", &self.domain)
            .finish_non_exhaustive()
    }
}
