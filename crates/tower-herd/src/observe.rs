//! What happens, told to whoever listens: "how often are we throttled, by whom?"
//!
//! Every decision that departs from the happy path is an [`Event`], handed to the [`Observe`]r of
//! the [`Fleet`](crate::Fleet). The default one, [`Trace`], emits `tracing` events (target
//! `tower_herd`); with the feature `metrics`, `Meter` counts them too. An event borrows what it
//! tells and is built only after [`Observe::enabled`] said yes.
//!
//! | event | `tracing` name | level | counter |
//! |---|---|---|---|
//! | [`Event::Signal`] of kind throttled | `throttled` | INFO | `tower_herd_signals_total{provider,scope,kind}` |
//! | [`Event::Signal`] of other kinds | `signal` | DEBUG | same |
//! | [`Event::Paused`] | `paused` | INFO | `tower_herd_pauses_total{provider,scope,reason}` |
//! | [`Event::Ceiling`] | `ceiling` | DEBUG | gauge `tower_herd_ceiling{provider}` |
//! | [`Event::Refused`] | `refused` | DEBUG | `tower_herd_refusals_total{provider,scope,kind}` |
//! | [`Event::Resend`] | `resend` | DEBUG | `tower_herd_resends_total{kind}` |
//! | [`Event::GaveUp`] | `gave_up` | INFO | `tower_herd_gave_up_total{kind}` |
//! | [`Event::Overflow`] | `overflow` | DEBUG | `tower_herd_overflows_total{from,to,kind}` |
//! | [`Event::WouldRefuse`] | `would_refuse` | DEBUG | `tower_herd_would_refuse_total{provider,scope,kind}` |
//! | [`Event::Breaker`] | `breaker` | WARN when it opens, else INFO | `tower_herd_breaker_total{provider,scope,to}` |
//! | [`Event::Ramp`] | `ramp` | INFO | gauge `tower_herd_readmitted{provider,scope}` |
//! | [`Event::InnerRetries`] | `inner_retries` | WARN | `tower_herd_inner_retries_total{provider}` |
//! | `Event::Lease` (feature `store`) | `lease` | WARN for the first error of an outage (ERROR where it does not heal by itself), DEBUG for those that follow, WARN when the lease is lost | `tower_herd_store_errors_total{provider,kind}`, `tower_herd_leases_lost_total{provider}` |
//! | [`Event::Store`] | `store` | WARN when it is lost, else INFO | gauge `tower_herd_store_down{store}` |
//! | [`Event::Inconsistent`] | `inconsistent` | WARN | `tower_herd_inconsistent_total` |
//!
//! All labels are bounded: providers and scopes are named by configuration, kinds and reasons are
//! fixed lists. Scopes chosen per request are as many as the caller makes them.

use crate::{Kind, RefusalKind};
use std::time::Duration;

/// Something happened. See the [module](self).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A reply that was not a plain success.
    #[non_exhaustive]
    Signal {
        /// The provider that was called.
        provider: &'a str,
        /// The scope below it, if any.
        scope: Option<&'a str>,
        /// What the reply said.
        kind: Kind,
        /// The wait that it asked for.
        wait: Option<Duration>,
    },
    /// Nobody calls this scope until `wait` has passed.
    #[non_exhaustive]
    Paused {
        /// The paused provider.
        provider: &'a str,
        /// The paused scope; none: all of the provider.
        scope: Option<&'a str>,
        /// Why: the name of a [`PauseReason`](crate::PauseReason). (What a breaker stops is told by
        /// [`Event::Breaker`].)
        reason: &'static str,
        /// How long from now.
        wait: Duration,
    },
    /// The learned ceiling moved.
    #[non_exhaustive]
    Ceiling {
        /// The provider.
        provider: &'a str,
        /// Slots before.
        from: u32,
        /// Slots now.
        to: u32,
    },
    /// One of our layers said no.
    #[non_exhaustive]
    Refused {
        /// The provider or ladder.
        provider: &'a str,
        /// The scope below it, if any.
        scope: Option<&'a str>,
        /// Which layer, and to what.
        kind: RefusalKind,
    },
    /// A request will be sent again.
    #[non_exhaustive]
    Resend {
        /// What its last reply said.
        kind: Kind,
        /// Attempts made so far.
        attempt: u32,
        /// How long it waits before.
        wait: Duration,
    },
    /// No more attempts: the caller gets the last real reply.
    #[non_exhaustive]
    GaveUp {
        /// What that reply said.
        kind: Kind,
        /// Attempts made.
        attempts: u32,
        /// Why no more are made.
        why: &'static str,
    },
    /// A task goes to another rung than the one it asked first.
    #[non_exhaustive]
    Overflow {
        /// The rung it left.
        from: &'a str,
        /// The rung it goes to.
        to: &'a str,
        /// What the reply of `from` said; [`Kind::Refused`] where it was not called.
        kind: Kind,
    },
    /// A layer that only observes would have said no.
    #[non_exhaustive]
    WouldRefuse {
        /// The provider or ladder.
        provider: &'a str,
        /// The scope below it, if any.
        scope: Option<&'a str>,
        /// Which layer, and to what.
        kind: RefusalKind,
    },
    /// A breaker changed its state.
    #[non_exhaustive]
    Breaker {
        /// The provider.
        provider: &'a str,
        /// The scope below it, if any.
        scope: Option<&'a str>,
        /// Its state now: `open` or `closed`.
        to: &'static str,
        /// For how long it opened at most.
        wait: Option<Duration>,
    },
    /// The share of tasks that a recovering provider gets back moved.
    #[non_exhaustive]
    Ramp {
        /// The provider.
        provider: &'a str,
        /// The scope below it, if any.
        scope: Option<&'a str>,
        /// The share now, 0 to 1.
        share: f64,
    },
    /// Something between us and the provider retries too, and multiplies with us: it should be off.
    #[non_exhaustive]
    InnerRetries {
        /// The provider, or who told us.
        provider: &'a str,
        /// Calls that were made for one of ours.
        attempts: u32,
    },
    /// The fleet's store did not answer, or (no error) the lease of this process has run out for it: the policy
    /// for that is in force until it answers again.
    #[cfg(feature = "store")]
    #[non_exhaustive]
    Lease {
        /// The provider.
        provider: &'a str,
        /// What is wrong.
        error: Option<&'a crate::store::StoreError>,
        /// It is the first error since the store last answered.
        begins: bool,
    },
    /// The store of retry tokens cannot be asked, or can be again.
    #[non_exhaustive]
    Store {
        /// Its name.
        store: &'a str,
        /// Whether it is lost.
        down: bool,
    },
    /// Settings or replies contradict each other; a safe reading was chosen.
    #[non_exhaustive]
    Inconsistent {
        /// The provider.
        provider: &'a str,
        /// What, in words.
        what: &'static str,
    },
}

/// Listens to [`Event`]s. Called synchronously on the path of calls: be quick, do not block.
pub trait Observe: Send + Sync + 'static {
    /// Whether events are wanted at all right now; asked before one is built.
    fn enabled(&self) -> bool {
        true
    }
    /// Takes one event.
    fn observe(&self, event: &Event<'_>);
}

/// Emits events through `tracing`. The default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trace;

impl Observe for Trace {
    fn enabled(&self) -> bool {
        tracing::level_filters::LevelFilter::current() != tracing::level_filters::LevelFilter::OFF
    }

    fn observe(&self, event: &Event<'_>) {
        use tracing::{debug, info, warn};
        const MS: fn(Duration) -> u64 = |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        match *event {
            Event::Signal { provider, scope, kind: Kind::Throttled, wait } => {
                info!(target: "tower_herd", provider, scope, wait_ms = wait.map(MS), "throttled");
            }
            Event::Signal { provider, scope, kind, wait } => {
                debug!(target: "tower_herd", provider, scope, kind = kind.as_str(), wait_ms = wait.map(MS), "signal");
            }
            Event::Paused { provider, scope, reason, wait } => {
                info!(target: "tower_herd", provider, scope, reason, wait_ms = MS(wait), "paused");
            }
            Event::Ceiling { provider, from, to } => {
                debug!(target: "tower_herd", provider, from, to, "ceiling");
            }
            Event::Refused { provider, scope, kind } => {
                debug!(target: "tower_herd", provider, scope, kind = kind.as_str(), "refused");
            }
            Event::Resend { kind, attempt, wait } => {
                debug!(target: "tower_herd", kind = kind.as_str(), attempt, wait_ms = MS(wait), "resend");
            }
            Event::GaveUp { kind, attempts, why } => {
                info!(target: "tower_herd", kind = kind.as_str(), attempts, why, "gave_up");
            }
            Event::Overflow { from, to, kind } => {
                debug!(target: "tower_herd", from, to, kind = kind.as_str(), "overflow");
            }
            Event::WouldRefuse { provider, scope, kind } => {
                debug!(target: "tower_herd", provider, scope, kind = kind.as_str(), "would_refuse");
            }
            Event::Breaker { provider, scope, to: "open", wait } => {
                warn!(target: "tower_herd", provider, scope, to = "open", wait_ms = wait.map(MS), "breaker");
            }
            Event::Breaker { provider, scope, to, .. } => {
                info!(target: "tower_herd", provider, scope, to, "breaker");
            }
            Event::Ramp { provider, scope, share } => {
                info!(target: "tower_herd", provider, scope, share, "ramp");
            }
            Event::InnerRetries { provider, attempts } => {
                warn!(target: "tower_herd", provider, attempts, "inner_retries");
            }
            #[cfg(feature = "store")]
            Event::Lease { provider, error: Some(error), begins } => {
                let source = std::error::Error::source(error).map(ToString::to_string);
                match (begins, error.kind().heals()) {
                    (true, true) => warn!(target: "tower_herd", provider, %error, source, "lease"),
                    (true, false) => tracing::error!(target: "tower_herd", provider, %error, source, "lease"),
                    (false, _) => debug!(target: "tower_herd", provider, %error, source, "lease"),
                }
            }
            #[cfg(feature = "store")]
            Event::Lease { provider, error: None, .. } => {
                warn!(target: "tower_herd", provider, "lease lost");
            }
            Event::Store { store, down: true } => {
                warn!(target: "tower_herd", store, down = true, "store");
            }
            Event::Store { store, down } => {
                info!(target: "tower_herd", store, down, "store");
            }
            Event::Inconsistent { provider, what } => {
                warn!(target: "tower_herd", provider, what, "inconsistent");
            }
        }
    }
}

/// Counts events through the `metrics` facade, and hands them on to [`Trace`].
///
/// The counters and their labels stand in the [module](self)'s table.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter;

#[cfg(feature = "metrics")]
impl Observe for Meter {
    fn observe(&self, event: &Event<'_>) {
        use metrics::{counter, gauge};
        let name = |name: Option<&str>| name.unwrap_or_default().to_owned();
        match *event {
            Event::Signal { provider, scope, kind, .. } => counter!("tower_herd_signals_total",
                "provider" => provider.to_owned(), "scope" => name(scope), "kind" => kind.as_str())
            .increment(1),
            Event::Paused { provider, scope, reason, .. } => counter!("tower_herd_pauses_total",
                "provider" => provider.to_owned(), "scope" => name(scope), "reason" => reason)
            .increment(1),
            Event::Ceiling { provider, to, .. } => {
                gauge!("tower_herd_ceiling", "provider" => provider.to_owned()).set(f64::from(to));
            }
            Event::Refused { provider, scope, kind, .. } => counter!("tower_herd_refusals_total",
                "provider" => provider.to_owned(), "scope" => name(scope), "kind" => kind.as_str())
            .increment(1),
            Event::Resend { kind, .. } => {
                counter!("tower_herd_resends_total", "kind" => kind.as_str()).increment(1);
            }
            Event::GaveUp { kind, .. } => {
                counter!("tower_herd_gave_up_total", "kind" => kind.as_str()).increment(1);
            }
            Event::Overflow { from, to, kind } => counter!("tower_herd_overflows_total",
                "from" => from.to_owned(), "to" => to.to_owned(), "kind" => kind.as_str())
            .increment(1),
            Event::WouldRefuse { provider, scope, kind, .. } => counter!("tower_herd_would_refuse_total",
                "provider" => provider.to_owned(), "scope" => name(scope), "kind" => kind.as_str())
            .increment(1),
            Event::Breaker { provider, scope, to, .. } => counter!("tower_herd_breaker_total",
                "provider" => provider.to_owned(), "scope" => name(scope), "to" => to)
            .increment(1),
            Event::Ramp { provider, scope, share } => {
                gauge!("tower_herd_readmitted", "provider" => provider.to_owned(), "scope" => name(scope))
                    .set(share);
            }
            Event::InnerRetries { provider, .. } => {
                counter!("tower_herd_inner_retries_total", "provider" => provider.to_owned()).increment(1);
            }
            #[cfg(feature = "store")]
            Event::Lease { provider, error: Some(error), .. } => counter!("tower_herd_store_errors_total",
                "provider" => provider.to_owned(), "kind" => error.kind().as_str())
            .increment(1),
            #[cfg(feature = "store")]
            Event::Lease { provider, error: None, .. } => {
                counter!("tower_herd_leases_lost_total", "provider" => provider.to_owned()).increment(1);
            }
            Event::Store { store, down } => {
                gauge!("tower_herd_store_down", "store" => store.to_owned()).set(f64::from(u8::from(down)));
            }
            Event::Inconsistent { .. } => counter!("tower_herd_inconsistent_total").increment(1),
        }
        if Trace.enabled() {
            Trace.observe(event);
        }
    }
}
