//! The breaker: nobody calls what is broken, and somebody is told once.
//!
//! # Why
//!
//! A provider that is down answers slowly, if at all: each call to it holds a slot for its whole timeout, costs
//! its task an attempt, and adds to what has to be served when the provider comes back. After a few of them
//! there is nothing more to learn, and the tasks are better off elsewhere. So the breaker opens: its
//! callers are refused at once, a ladder passes over the rung, and one probe at a time asks whether it is
//! well again.
//!
//! Breakers have a bad name for three habits, all of them seen in public:
//!
//! - **They open for the wrong thing.** Three 429s became 113 failures (rohitg00/agentmemory#1075); one user's
//!   filtered prompt stopped a model for all (BerriAI/litellm#5225); one poison request opened the breaker
//!   of every key in turn (samosa-ai-com/opencode-go-multi-auth#6). Here only failures of the provider count.
//! - **They never close.** A probe that got lost kept one half open for six days (diegosouzapw/OmniRoute#13836);
//!   callers that were turned away stamped the timer anew (openabdev/openab#969). Here a probe is a guard with a
//!   deadline, and nobody who is refused changes anything.
//! - **They let everybody back at once.** Here the end of the open time lets nobody through: that takes a good
//!   probe, and after it the ramp ([`readmission`](crate::readmission)) brings the traffic back by and by.
//!
//! # Where it stands
//!
//! Outside the [pause](crate::retry_after) and the [limit](crate::fleet_limit), and inside the ladder. Left
//! out, a dead provider is called until its timeouts have used up the attempts of all tasks. Inside the pause
//! it would come too late: an open breaker *is* a pause of its scope, which the pause layer would sit out for
//! those whose deadline allows.
//!
//! Since it is a pause, what stands further in obeys it too: calls that passed the breaker before it
//! opened, and wait for a slot, do not follow those that failed. They are refused as well, with the same
//! [`Refusal`](crate::Refusal). A pause that the server asked for is neither shortened nor prolonged by it, and no
//! probe goes before the server's own word is over.
//!
//! # What it counts
//!
//! The last n calls **by when they were sent**, of those whose outcome is known: n = 20, and it opens at 90 %, which
//! are 18 failures. That is the least volume too: one of one is not enough (BerriAI/litellm#17464). Outcomes come
//! late and in any order, so by when they came would be wrong: twenty calls that hung for thirty seconds say what
//! the provider was then, and a thousand that were sent since and went well say what it is.
//!
//! | outcome | counts as |
//! |---|---|
//! | [`Success`](crate::Kind::Success), [`Empty`](crate::Kind::Empty) | success |
//! | [`Failed`](crate::Kind::Failed), [`Overloaded`](crate::Kind::Overloaded) | failure |
//! | dropped after the deadline of its task | failure: whoever waited so long was not impatient |
//! | [`Throttled`](crate::Kind::Throttled), [`Depleted`](crate::Kind::Depleted), [`Misconfigured`](crate::Kind::Misconfigured), [`Rejected`](crate::Kind::Rejected), [`Refused`](crate::Kind::Refused) | nothing |
//! | cut by its task's deadline, by drop or by timeout, sooner than half of all calls have their reply | nothing: it waited too long for us |
//! | dropped before | nothing: who presses Stop opens no breaker |
//! | failed here after its task has failed at another rung of the ladder | nothing: it may be the request's fault |
//! | sent before the breaker last opened or closed | nothing |
//!
//! The window slides: after a million successes it opens as fast as after none. A provider that fails 30 %
//! of its calls is not broken, and does not open it; what such a provider gets less of, the
//! [budget](crate::budget) decides. [`BreakerSettings::strict`] opens after five failures in a row, and that
//! is dear where calls are many: with failure rate p they come once in (p^-5 - 1) / (1 - p) calls (the expected
//! wait for a run of five), so that one with p = 0.2 is shut every 3,900 calls.
//!
//! A breaker made for a [scope](crate::Provider::scope) counts that scope's calls; one made for the provider
//! counts all.
//!
//! # Open, and half open
//!
//! It is open for 10 minutes, and up to a quarter more, so that processes which tripped together do not
//! come back together. Probes do not wait for that: the first goes a uniform time in [5 s, 10 s] after the
//! trip, and each that fails doubles the range, up to [15 s, 30 s]. One is in flight at a time, for 30 s at
//! most; then it is given up, and another may go. A probe that its caller drops is no verdict. What closes the
//! breaker is a good head (the body of a stream may last for hours), or a 429: who throttles is alive.
//! When the open time ends without one, there are still only probes.
//!
//! A probe is an ordinary call, of the next caller who comes, or that waits, and has time enough: as long as 95 %
//! of the calls take to the head of their reply, as far as that is known; who waits and has less leaves it to others
//! (for 10 s: then it is anybody's). It takes a slot, and passes all layers that would keep it back. One that was
//! dropped or cut doubles nothing, and the next may go 5 to 10 s after it.
//!
//! # The alert
//!
//! An incident lasts from the first trip to the end of the ramp, and raises one [`Alert`]: what broke, since
//! when, a few of the failures, what will be kept back. It goes to [`on_alert`](BreakerLayer::on_alert) and to
//! `tracing` (`WARN`, target `tower_herd`, message `alert`); with the feature `serde` it can be sent as
//! it is. An empty account and a wrong key raise one each time their pause begins. Each change of state
//! is an [`Event::Breaker`](crate::observe::Event::Breaker).
//!
//! # Errors and cancellation
//!
//! Who is refused gets a refusal of kind `Open` with the end of the open time (when that is over: the next
//! probe). It costs no attempt and is counted nowhere. Dropping the future drops the call; the probe that
//! it may be goes to another.
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{BreakerLayer, ClassifyLayer, Fleet, FleetLimitLayer, RetryAfterLayer};
//!
//! # let client = service_fn(|_: http::Request<String>| async {
//! #     Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
//! # });
//! let search = Fleet::local().provider("search");
//! let breaker = BreakerLayer::new(&search).on_alert(|alert| eprintln!("page somebody: {alert:?}"));
//! let handle = breaker.handle();
//! let service = ServiceBuilder::new()
//!     .layer(breaker)
//!     .layer(RetryAfterLayer::new(&search))
//!     .layer(FleetLimitLayer::new(&search))
//!     .layer(ClassifyLayer::new(&search))
//!     .service(client);
//! // Maintenance: nobody calls until it is closed again.
//! handle.force_open();
//! handle.close();
//! # let _ = service;
//! ```
//!
//! With settings of one's own, which belong to the provider: another layer for it has the same, or fails.
//!
//! ```
//! use std::time::Duration;
//! use tower_herd::{BreakerLayer, BreakerSettings, Fleet};
//!
//! let index = Fleet::local().provider("index");
//! let settings = BreakerSettings::new().window(100).ratio(0.5).open(Duration::from_secs(60));
//! let layer = BreakerLayer::new(&index).settings(settings)?;
//! assert!(BreakerLayer::new(&index).strict().is_err());
//! # let _ = layer;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```

mod alert;
mod cell;
mod config;
mod future;
mod handle;
mod layer;
mod service;
mod state;
mod sync;

#[cfg(all(test, herd_loom))]
mod loom_tests;
#[cfg(all(test, not(herd_loom)))]
mod tests;

pub use alert::{Alert, AlertKind, Sample};
pub use config::BreakerSettings;
pub use future::ResponseFuture;
pub use handle::{BreakerHandle, BreakerState};
pub use layer::BreakerLayer;
pub use service::Breaker;

pub(crate) use alert::{Facts, Trouble};
pub(crate) use cell::{About, Cell};
