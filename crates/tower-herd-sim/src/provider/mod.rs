//! Scripted providers: servers with a quota and a temper, as tower services.
//!
//! A [`Script`] says how the provider behaves; [`ScriptedProvider`] runs it. Every
//! [`ProviderService`] made from one provider shares its quota and its account. The quota can be a
//! concurrency ceiling, a request rate, a token rate or all of them, and can change at instants
//! nobody announced. A refused call answers after a few milliseconds with a 429 in the dialect of
//! the script; an admitted one holds its place until its natural end.
//!
//! What happens to a call whose caller hangs up is a choice, because real providers differ: an
//! aborting one frees the place at once, the others finish the work (and bill it) regardless.
//! That is how a client that cancels and resends executes a task twice, and why [`Stats`] counts
//! `duplicates`.
//!
//! # Who is asking
//! A request names its task with an extension [`Caller`] or with the header `x-task-id`, and its
//! process with the extension, with `x-process-id` or by using a service made by
//! [`ScriptedProvider::service_for`]. The cost of a call in tokens is read from `x-cost`, or by a
//! closure ([`Script::cost_by`]).
//!
//! # What "early" means
//! A call is early when it arrives before an instant that this provider announced with an explicit
//! Retry-After (in any of its forms), if the refusal that announced it had already been delivered
//! to the same process. A refusal that is still on its way binds nobody. While a pause of more than
//! five minutes runs, calls are counted as `probes` instead.

mod body;
mod dialect;
mod quota;
mod recorder;
mod script;
mod service;
mod state;

pub use body::ScriptedBody;
pub use dialect::{HintForm, LimitHeaders};
pub use quota::{Bucket, Meter, Quota, Rate, Window};
pub use recorder::{CallRecord, Outcome, Stats, peak, peak_after, series};
pub use script::{Cost, Fault, Script};
pub use service::{CallError, Caller, ProviderFuture, ProviderService, ScriptedProvider};
