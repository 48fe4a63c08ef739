//! The ramp: a recovering provider gets its traffic back by growing fractions.
//!
//! # Why
//!
//! A provider is down for ten minutes. Its first good reply closes the breaker, or its long pause ends, and
//! everybody who was waiting comes at that instant: 4,999 calls of 5,000 after one good probe. Caches are
//! cold, autoscalers have let machines go, the rungs that took over lose all their tasks at once, and the
//! provider is down again. Penalties that all end on the same tick do the same
//! (gabrielkoerich/orch#329).
//!
//! So its tasks come back by a growing fraction, and a fraction means *which* tasks, not which calls. Each task
//! has a number in [0, 1) by a hash of its affinity key and the provider's name, and is back
//! once the share has grown past it. So all its calls go one way (a conversation changes its rung
//! once, and its prompt cache with it), the same tasks are back in every process although none talks to
//! another, and every task has an instant of its own, so there is no tick on which a crowd returns.
//!
//! # When
//!
//! After an open breaker, and after a pause of over five minutes; never after a short pause, whose
//! waiters [leave in a line](crate::retry_after) anyway. It belongs to what was closed, the provider or one
//! [scope](crate::Provider::scope); where both recover, a task has to be back at both.
//!
//! | profile | share after `t` | source |
//! |---|---|---|
//! | [`Profile::default`] | `0.05 * 2^(t / 5 s)`, complete after 21.6 s | geometric, as below |
//! | [`Profile::half_more_every_15_min`] | `0.05 * 1.5^(t / 15 min)` | the form of Firestore's "500/50/5" rule: so much at first, then 50 % more each time |
//! | [`Profile::doubling_every_20_min`] | `0.05 * 2^(t / 20 min)` | Cloud Storage's guideline for request rates |
//! | [`Profile::slow_start`] | `max(min, (max(t, 1 s) / window)^(1 / aggression))` | Envoy, "Slow start mode" |
//! | [`Profile::geometric`], [`Profile::SlowStart`] | of your own figures | |
//!
//! Whatever the profile, the ramp takes **no longer than the provider was closed**: two minutes of trouble are
//! not answered by an hour of caution. A longer curve is run through faster. While a short pause holds it,
//! the ramp stands still.
//!
//! # Throttling on the way
//!
//! Three or more 429s within one step (5 s by default) that are more than 1 % of its calls take the ramp
//! back by one step, once, where it stands until a step has passed without them. One stray 429 in two
//! hundred calls changes nothing. It is over in the same time all the same: what the provider can carry
//! is for its [ceiling](crate::fleet_limit) to find.
//!
//! # Who is not back yet
//!
//! Gets a [`Refusal`](crate::Refusal) of kind `NotReadmitted`, whose `retry_at` is the very instant
//! at which the task will be back if nothing disturbs the ramp; a retry layer sleeps until then free of
//! charge where that fits the deadline. A [ladder](crate::failover) asks before it takes a slot or a
//! place in the queue: the task goes to the next rungs, into free slots only, and returns to its own
//! when the ramp reaches it. While a long pause is still in force, the instant after it is
//! told already, so that no crowd waits at the gate for its end. A [probe](crate::retry_after) that is due
//! goes through, whatever its key, and who has the time to wait for all of that pause is told to
//! come back for the next probe first.
//!
//! A call that belongs to no task is drawn for anew each time.
//!
//! # Where it stands
//!
//! In the stack of a rung, outermost: inside retry and failover, outside everything that counts, holds or
//! waits.
//!
//! | if | then |
//! |---|---|
//! | it is left out | everybody is back at the first good reply |
//! | it is outside the retry layer | a refusal is final: nobody waits for the instant |
//! | it is inside [`RetryAfterLayer`](crate::RetryAfterLayer) | callers wait for a pause, and learn after it that they are not back |
//! | it is inside [`FleetLimitLayer`](crate::FleetLimitLayer) | who is refused held a slot, and stood in the queue before who is back |
//! | [`TaskLayer`](crate::TaskLayer) is left out | each call is drawn for, and a task is back with some of its calls |
//!
//! # What it counts, and costs
//!
//! The profile is the provider's: a second, differing one is a [`SettingsError`](crate::SettingsError). While
//! no ramp runs a call pays one relaxed load (two in a scope) and nothing is counted; while one runs, a lock
//! and a hash. [`Event::Ramp`](crate::observe::Event::Ramp) tells of each step, and
//! [`Provider::readmitted`](crate::Provider::readmitted) of the share. Dropping the future undoes
//! nothing, since nothing was taken.
//!
//! # Examples
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{
//!     ClassifyLayer, Fleet, FleetLimitLayer, JitteredRetryLayer, RampedReadmissionLayer, RetryAfterLayer,
//!     TaskLayer,
//! };
//!
//! let search = Fleet::local().provider("search");
//! let service = ServiceBuilder::new()
//!     .layer(TaskLayer::new())
//!     .layer(JitteredRetryLayer::new())
//!     .layer(RampedReadmissionLayer::new(&search))
//!     .layer(RetryAfterLayer::new(&search))
//!     .layer(FleetLimitLayer::new(&search))
//!     .layer(ClassifyLayer::new(&search))
//!     .service(service_fn(|_: http::Request<String>| async {
//!         Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
//!     }));
//! # let _ = service;
//! ```
//!
//! A vendor asks that traffic grow by no more than half every 15 minutes; first it is only watched what that
//! would refuse:
//!
//! ```
//! use tower_herd::{Fleet, Mode, RampedReadmissionLayer, Switch, readmission::Profile};
//!
//! let llm = Fleet::local().provider("llm");
//! let switch = Switch::new(Mode::Observe);
//! let layer = RampedReadmissionLayer::new(&llm)
//!     .profile(Profile::half_more_every_15_min())?
//!     .switch(&switch);
//! # let _ = layer;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```

mod config;
mod error;
mod future;
pub(crate) mod hash;
mod layer;
mod service;
pub(crate) mod state;

pub use config::Profile;
pub use future::ResponseFuture;
pub use layer::RampedReadmissionLayer;
pub use service::RampedReadmission;
