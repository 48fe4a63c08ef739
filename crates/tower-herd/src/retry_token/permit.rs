//! A granted run, until it is settled.

use super::{
    Claim, Deferral, DeferredBy, Grant, HolderId, OnOutage, Outcome, RetryTokens, Schedule, Tokens, Wait,
    WaitCause,
    tokens::{Source, Work},
};
use crate::Time;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep};

/// Longer waits that a reply asks for are not believed: 24 h, as for a provider's pause.
const LONGEST_HINT: Duration = Duration::from_secs(24 * 3600);

/// What is held while a job runs, and settled when it is over.
pub trait Permit: sealed::Sealed {
    /// Does what is due while it runs.
    #[doc(hidden)]
    fn poll_beat(&mut self, cx: &mut Context<'_>);
    /// It is over.
    #[doc(hidden)]
    fn settle(self, outcome: Outcome) -> Settled;
}

pub(super) mod sealed {
    #[expect(unnameable_types, reason = "nobody else implements it")]
    pub trait Sealed {}
}

/// What is left to do after a run.
#[doc(hidden)]
#[expect(unnameable_types, reason = "nobody else makes one")]
#[derive(Default)]
pub struct Settled {
    /// What the store is to be told.
    pub(super) work: Option<Work<()>>,
    /// When the job is to come back.
    pub(super) deferral: Option<Deferral>,
}

impl fmt::Debug for Settled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settled").field("deferral", &self.deferral).finish_non_exhaustive()
    }
}

/// May it run?
pub(super) enum Verdict<P> {
    /// Without a permit where no token protects it.
    Run(Option<P>),
    Refuse(Wait),
}

/// The permit of [`RetryToken`](super::RetryToken). Dropped unsettled it writes nothing: the token stays, and the key
/// opens when its wait is over.
pub struct RunPermit<T> {
    tokens: Tokens<T>,
    key: Arc<str>,
    grant: Grant,
    source: Source,
    /// The key is closed until then, as far as is known here.
    until: Time,
    heart: Option<Box<Heart>>,
    settled: bool,
}

/// Prolongs a token while its run goes on.
pub(super) struct Heart {
    lease: Duration,
    sleep: Pin<Box<Sleep>>,
    beat: Option<Work<Option<bool>>>,
}

impl Heart {
    pub(super) fn new(lease: Duration) -> Box<Self> {
        Box::new(Heart { lease, sleep: Box::pin(tokio::time::sleep(lease / 3)), beat: None })
    }

    /// Beats when it is time to. Ready after each beat: whether the token was still held, if its store could say.
    pub(super) fn poll_beat<T: RetryTokens>(
        &mut self,
        cx: &mut Context<'_>,
        tokens: &Tokens<T>,
        key: &Arc<str>,
        holder: HolderId,
        source: Source,
    ) -> Poll<Option<bool>> {
        if self.beat.is_none() {
            ready!(self.sleep.as_mut().poll(cx));
        }
        let beat = self.beat.get_or_insert_with(|| {
            let (tokens, key, lease) = (tokens.clone(), key.clone(), self.lease);
            Box::pin(async move { tokens.extend(&key, holder, lease, source).await })
        });
        let held = ready!(beat.as_mut().poll(cx));
        self.beat = None;
        self.sleep.as_mut().reset(Instant::now() + self.lease / 3);
        Poll::Ready(held)
    }
}

/// What the answer to a claim means for this job.
pub(super) fn verdict<T: RetryTokens>(
    tokens: &Tokens<T>,
    key: &Arc<str>,
    schedule: &Schedule,
    attempt: u32,
    answer: Option<(Claim, Source)>,
) -> Verdict<RunPermit<T>> {
    match answer {
        Some((Claim::Granted(grant), source)) => {
            if grant.streak == 1 && attempt > 1 && tokens.store().local().is_some() {
                tokens.stranger(attempt);
            }
            tokens.started();
            let until = tokens.clock().now().saturating_add(grant.next_in);
            let heart = schedule.lease().map(Heart::new);
            let (tokens, key) = (tokens.clone(), key.clone());
            Verdict::Run(Some(RunPermit { tokens, key, grant, source, until, heart, settled: false }))
        }
        // Nobody could be asked who knows: a first attempt is no herd.
        Some((Claim::NotBefore(wait), source))
            if attempt <= 1 && (source == Source::Warm || wait.cause != WaitCause::Token) =>
        {
            Verdict::Run(None)
        }
        Some((Claim::NotBefore(wait), _)) => Verdict::Refuse(wait),
        None if attempt <= 1 || tokens.policy() == OnOutage::Open => Verdict::Run(None),
        None => Verdict::Refuse(Wait { wait: tokens.outage_wait(), streak: 0, cause: WaitCause::StoreDown }),
    }
}

impl<T: RetryTokens> sealed::Sealed for RunPermit<T> {}

impl<T: RetryTokens> Permit for RunPermit<T> {
    fn poll_beat(&mut self, cx: &mut Context<'_>) {
        while let Some(heart) = &mut self.heart {
            let lease = heart.lease;
            match heart.poll_beat(cx, &self.tokens, &self.key, self.grant.holder, self.source) {
                Poll::Pending => return,
                Poll::Ready(Some(true)) => {
                    self.until = self.until.max(self.tokens.clock().now().saturating_add(lease));
                }
                // The next one may get through.
                Poll::Ready(None) => {}
                // The lease was over before its heartbeat came.
                Poll::Ready(Some(false)) => {
                    self.heart = None;
                    tracing::warn!(
                        target: "tower_herd",
                        store = self.tokens.name(),
                        key = &*self.key,
                        "the lease of a job that still runs was lost: another may run beside it"
                    );
                }
            }
        }
    }

    fn settle(mut self, outcome: Outcome) -> Settled {
        self.settled = true;
        let (holder, source) = (self.grant.holder, self.source);
        let local = self.tokens.store().local();
        match outcome {
            Outcome::Neutral => Settled::default(),
            Outcome::Success => {
                if let Some(local) = local {
                    local.clear_now(&self.key, holder);
                    return Settled::default();
                }
                let (tokens, key) = (self.tokens.clone(), self.key.clone());
                let work: Work<()> = Box::pin(async move {
                    tokens.clear(&key, holder, source).await;
                });
                Settled { work: Some(work), deferral: None }
            }
            Outcome::Failure { retry_after } => {
                let left = self.until.saturating_since(self.tokens.clock().now());
                let hint = retry_after.unwrap_or_default().min(LONGEST_HINT);
                let deferral = Deferral {
                    wait: left.max(hint).max(Duration::from_millis(1)),
                    streak: self.grant.streak,
                    why: DeferredBy::Failure,
                };
                let mut settled = Settled { work: None, deferral: Some(deferral) };
                if hint > left {
                    if let Some(local) = local {
                        local.extend_now(&self.key, holder, hint);
                    } else {
                        let (tokens, key) = (self.tokens.clone(), self.key.clone());
                        settled.work = Some(Box::pin(async move {
                            tokens.extend(&key, holder, hint, source).await;
                        }));
                    }
                }
                settled
            }
        }
    }
}

impl<T> Drop for RunPermit<T> {
    fn drop(&mut self) {
        self.tokens.ended(self.settled);
    }
}

impl<T> fmt::Debug for RunPermit<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunPermit")
            .field("key", &self.key)
            .field("grant", &self.grant)
            .finish_non_exhaustive()
    }
}
