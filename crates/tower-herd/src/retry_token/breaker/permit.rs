//! What the layers of one store share about their dependencies, and what a run holds.

use super::{
    JobBreakerSettings,
    state::{Failed, Seen, failed, seen},
};
use crate::{
    Alert, Time,
    breaker::{AlertKind, Facts, Trouble},
    retry_token::{
        Claim, HolderId, Outcome, RetryTokens, Tokens, Wait, WaitCause,
        permit::{Heart, Permit, Settled, Verdict, sealed},
        tokens::{Source, Work, lock},
    },
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, OnceLock},
    task::{Context, Poll},
};

/// How often a failure that coincides with others is claimed again. Each waits a millisecond; the rest of a crowd that
/// fails in one instant is not needed to open it.
const TRIES: u32 = 16;
const LONGEST: std::time::Duration = std::time::Duration::from_millis(10);

/// Names that are remembered.
const NAMES: usize = 1024;

pub(super) type Listener = Box<dyn Fn(&Alert) + Send + Sync>;

pub(crate) struct Shared<T> {
    tokens: Tokens<T>,
    settings: JobBreakerSettings,
    listener: OnceLock<Listener>,
    known: Mutex<HashMap<Arc<str>, Known>>,
    keys: Mutex<HashMap<Arc<str>, Arc<str>>>,
}

/// What this process has seen of a dependency since it was last well.
#[derive(Clone, Copy, Default)]
struct Known {
    trouble: Trouble,
    deferred: u64,
    /// Of the incident whose alert was raised here: its id, and until when it is open.
    incident: Option<(u64, Time)>,
}

impl<T> Shared<T> {
    pub(super) fn new(tokens: Tokens<T>, settings: JobBreakerSettings) -> Self {
        Shared {
            tokens,
            settings,
            listener: OnceLock::new(),
            known: Mutex::default(),
            keys: Mutex::default(),
        }
    }

    pub(super) fn tokens(&self) -> &Tokens<T> {
        &self.tokens
    }

    /// A dependency's name, and the key of its token.
    pub(super) fn names(&self, dependency: &str) -> (Arc<str>, Arc<str>) {
        let mut keys = lock(&self.keys);
        if let Some((name, key)) = keys.get_key_value(dependency) {
            return (name.clone(), key.clone());
        }
        let (name, key): (Arc<str>, Arc<str>) = (dependency.into(), format!("breaker:{dependency}").into());
        // They are few; if somebody takes a job's id for one, this is not where it is remembered for ever.
        if keys.len() < NAMES {
            keys.insert(name.clone(), key.clone());
        }
        (name, key)
    }

    pub(super) fn listen(&self, listener: Listener) {
        self.listener.get_or_init(|| listener);
    }

    fn with<A>(&self, dependency: &Arc<str>, change: impl FnOnce(&mut Known) -> A) -> A {
        let mut known = lock(&self.known);
        if known.len() >= NAMES && !known.contains_key(dependency) {
            return change(&mut Known::default());
        }
        change(known.entry(dependency.clone()).or_default())
    }

    pub(super) fn deferred(&self, dependency: &str) -> u64 {
        lock(&self.known).get(dependency).map_or(0, |known| known.deferred)
    }

    pub(super) fn incident(&self, dependency: &str) -> Option<Alert> {
        let known = *lock(&self.known).get(dependency)?;
        known.incident.map(|(id, until)| self.alert(dependency, &known, id, until))
    }

    fn alert(&self, dependency: &str, known: &Known, incident: u64, until: Time) -> Alert {
        let failures = self.settings.failures as usize;
        let kind = AlertKind::Broken;
        let facts = Facts { kind, incident, failures, calls: failures, until, refused: known.deferred };
        let clock = self.tokens.clock();
        Alert::new(dependency, None, &known.trouble, facts, clock, clock.now())
    }

    /// It is well again.
    fn closed(&self, dependency: &Arc<str>, probe: bool) {
        let known = lock(&self.known).remove(dependency).unwrap_or_default();
        if probe {
            self.tokens.told_breaker(dependency, "closed", None);
            tracing::info!(
                target: "tower_herd",
                dependency = &**dependency,
                deferred = known.deferred,
                "the probe succeeded: jobs of this dependency run again"
            );
        }
    }
}

impl<T: RetryTokens> Shared<T> {
    fn permit(self: &Arc<Self>, dependency: &Arc<str>, key: &Arc<str>, role: Role) -> BreakerPermit<T> {
        let heart = matches!(role, Role::Probe { .. }).then(|| Heart::new(self.settings.probe_timeout));
        let (shared, dependency, key) = (self.clone(), dependency.clone(), key.clone());
        BreakerPermit { shared, dependency, key, role, heart }
    }

    /// May a job of this dependency run, as far as this process knows without asking anybody?
    pub(super) fn admit_now(
        self: &Arc<Self>,
        dependency: &Arc<str>,
        key: &Arc<str>,
    ) -> Option<BreakerPermit<T>> {
        let token = self.tokens.store().local()?.peek_now(key);
        match seen(token.as_ref(), self.settings.failures) {
            Seen::Closed(failures) => {
                Some(self.permit(dependency, key, Role::Closed { failures, source: Source::Store }))
            }
            Seen::Open(_) | Seen::HalfOpen => None,
        }
    }

    /// May a job of this dependency run?
    pub(super) async fn admit(
        self: &Arc<Self>,
        dependency: &Arc<str>,
        key: &Arc<str>,
    ) -> Verdict<BreakerPermit<T>> {
        let threshold = self.settings.failures;
        let permit = |role| Verdict::Run(Some(self.permit(dependency, key, role)));
        let (token, source) = self.tokens.peek(key).await;
        match seen(token.as_ref(), threshold) {
            Seen::Closed(failures) => permit(Role::Closed { failures, source }),
            Seen::Open(wait) => {
                let streak = token.map_or(threshold, |token| token.streak);
                self.refused(dependency, Wait { wait, streak, cause: WaitCause::Breaker })
            }
            Seen::HalfOpen => match self.tokens.claim(key, &self.settings.probing()).await {
                Some((Claim::Granted(probe), source)) if probe.streak > threshold => {
                    permit(Role::Probe { holder: probe.holder, source })
                }
                // It has closed in between: this is not a probe, and must not be in the way of counting.
                Some((Claim::Granted(grant), source)) => {
                    self.tokens.clear(key, grant.holder, source).await;
                    permit(Role::Closed { failures: None, source })
                }
                Some((Claim::NotBefore(wait), _)) => {
                    self.refused(dependency, Wait { cause: WaitCause::Breaker, ..wait })
                }
                // Nobody can be asked, and the policy is not to decide alone: retries are for the token layer to refuse.
                None => Verdict::Run(None),
            },
        }
    }

    fn refused<P>(&self, dependency: &Arc<str>, wait: Wait) -> Verdict<P> {
        self.with(dependency, |known| known.deferred += 1);
        Verdict::Refuse(wait)
    }

    /// A run failed while it was closed.
    async fn count(&self, dependency: &Arc<str>, key: &str) {
        let threshold = self.settings.failures;
        let now = self.tokens.clock().now();
        self.with(dependency, |known| known.trouble.add("failed", now));
        for _ in 0..TRIES {
            // What failed after its time was begun before it opened: it is no news, and no probe.
            if !matches!(seen(self.tokens.peek(key).await.0.as_ref(), threshold), Seen::Closed(_)) {
                return;
            }
            let Some((claim, source)) = self.tokens.claim(key, &JobBreakerSettings::counting()).await else {
                return;
            };
            match failed(&claim, threshold) {
                Failed::Counted | Failed::Late => return,
                // Longer ones are nobody's count: somebody looks for a probe that is not needed any more.
                Failed::Again(wait) => tokio::time::sleep(wait.min(LONGEST)).await,
                Failed::Opens(holder, first) => {
                    self.opens(dependency, key, holder, source, first).await;
                    return;
                }
            }
        }
    }

    /// It opens, and if this is news, it is told.
    async fn opens(&self, dependency: &Arc<str>, key: &str, holder: HolderId, source: Source, first: bool) {
        let open = self.settings.opening(self.tokens.unit());
        // Told in any case: if the store is lost at this instant, the breaker is not open, but the dependency is broken.
        if first {
            let until = self.tokens.clock().now().saturating_add(open);
            let id = self.tokens.bits();
            let known = self.with(dependency, |known| {
                known.incident = Some((id, until));
                *known
            });
            let alert = self.alert(dependency, &known, id, until);
            alert.tell();
            if let Some(listener) = self.listener.get() {
                listener(&alert);
            }
        }
        self.tokens.extend(key, holder, open, source).await;
        self.tokens.told_breaker(dependency, "open", Some(open));
    }
}

impl<T> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("tokens", &self.tokens)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The permit of [`JobBreaker`](crate::retry_token::JobBreaker). Dropped unsettled it is no verdict; a probe is given
/// up when its lease is over.
pub struct BreakerPermit<T> {
    shared: Arc<Shared<T>>,
    dependency: Arc<str>,
    key: Arc<str>,
    role: Role,
    heart: Option<Box<Heart>>,
}

#[derive(Clone, Copy)]
enum Role {
    /// There were failures before it, or not.
    Closed {
        failures: Option<HolderId>,
        source: Source,
    },
    Probe {
        holder: HolderId,
        source: Source,
    },
}

impl<T: RetryTokens> sealed::Sealed for BreakerPermit<T> {}

impl<T: RetryTokens> Permit for BreakerPermit<T> {
    fn poll_beat(&mut self, cx: &mut Context<'_>) {
        let (Some(heart), Role::Probe { holder, source }) = (&mut self.heart, self.role) else { return };
        while let Poll::Ready(held) = heart.poll_beat(cx, &self.shared.tokens, &self.key, holder, source) {
            // Lost: another probes, and this run is one among others.
            if held == Some(false) {
                self.heart = None;
                return;
            }
        }
    }

    fn settle(self, outcome: Outcome) -> Settled {
        let work: Work<()> = match (outcome, self.role) {
            (Outcome::Neutral, _) | (Outcome::Success, Role::Closed { failures: None, .. }) => {
                return Settled::default();
            }
            (Outcome::Success, Role::Closed { failures: Some(holder), source }) => Box::pin(async move {
                // Only the failures that it knew of: those that came since are about calls sent later.
                if self.shared.tokens.clear(&self.key, holder, source).await == Some(true) {
                    self.shared.closed(&self.dependency, false);
                }
            }),
            (Outcome::Success, Role::Probe { holder, source }) => Box::pin(async move {
                if self.shared.tokens.clear(&self.key, holder, source).await == Some(true) {
                    self.shared.closed(&self.dependency, true);
                }
            }),
            (Outcome::Failure { .. }, Role::Closed { .. }) => Box::pin(async move {
                self.shared.count(&self.dependency, &self.key).await;
            }),
            // The same incident: nobody is told again.
            (Outcome::Failure { .. }, Role::Probe { holder, source }) => Box::pin(async move {
                self.shared.opens(&self.dependency, &self.key, holder, source, false).await;
            }),
        };
        Settled { work: Some(work), deferral: None }
    }
}

impl<T> fmt::Debug for BreakerPermit<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BreakerPermit").field("dependency", &self.dependency).finish_non_exhaustive()
    }
}
