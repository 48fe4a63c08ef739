//! The memory of a task's tool calls, so that a model which calls again is answered here.
//!
//! # Why
//!
//! A retry layer sends a call once more; a model makes a new one. It is told "the payment timed out", and
//! calls the payment tool again, with a fresh call id: no layer below can know that this is the same charge
//! (langchain-ai/langchain#40688, openai/openai-agents-python#4254). Or a tool fails, the model rewords the
//! arguments, the tool fails, for five hours (NousResearch/hermes-agent#91713). [`ToolCallsLayer`] knows both
//! by the [`Task`](crate::Task) that the calls belong to, and refuses
//!
//! - a call **in doubt**: an earlier one of the same [`IdempotencyKey`](crate::IdempotencyKey) may have taken
//!   effect, or still runs, and the tool must not do it twice ([`Safety::Once`](crate::Safety::Once)). The
//!   answer is to look it up, by another tool or a person. Where the server knows idempotency keys
//!   ([`Safety::Keyed`](crate::Safety::Keyed)), calling again is that look-up, and passes;
//! - a **futile** call: the tool has failed so many times in a row in this task, whatever the arguments
//!   ([`failures`](ToolCallsLayer::failures), default 5);
//! - one **too many**: the task has made so many tool calls ([`calls`](ToolCallsLayer::calls), default
//!   1000).
//!
//! All three are a [`Refusal`](crate::Refusal) of kind `Exhausted`, whose `why` is fit to be shown to a
//! model. What lets a call pass is counted per task, and forgotten with it. A call of no task passes.
//!
//! | outcome | in doubt afterwards | counts as a failure of the tool |
//! |---|---|---|
//! | success, empty | no | no: the count starts again |
//! | refusal of our own | no | no |
//! | failed, overloaded, executed maybe; or the call was dropped while it ran | yes | yes (a drop: no) |
//! | everything else | no | yes |
//!
//! # Where it stands
//!
//! Inside [`TaskLayer`](crate::TaskLayer), outside [`JitteredRetryLayer`](crate::JitteredRetryLayer): it
//! counts what the model asks for, not what the network makes of it. *Inside* the retry layer, each attempt
//! would count as a call of the model, and a repetition of its own would find itself in doubt. Left out, the
//! layers below still repeat nothing that must not be; the model does.
//!
//! # What it costs
//!
//! A hash of the arguments, and a lock of the task twice, for a map of its tools; calls of several tasks
//! share nothing.
//!
//! # Examples
//!
//! ```
//! use std::error::Error;
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_herd::{
//!     Fleet, HasTask, Refusal, Signal, Kind, Task, ToolCallsLayer, classify::signal_of_error, classify_fn,
//!     tool_calls::Call,
//! };
//!
//! #[derive(Clone)]
//! struct Charge { arguments: String, task: Task }
//! // No hint that says otherwise: it must not take effect twice.
//! impl HasTask for Charge {
//!     fn task(&self) -> Option<&Task> { Some(&self.task) }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let bank = Fleet::local().provider("bank");
//! let understood = classify_fn(|outcome: Result<&(), &(dyn Error + 'static)>| match outcome {
//!     Ok(()) => Signal::new(Kind::Success),
//!     Err(error) => signal_of_error(error),
//! });
//! let layer = ToolCallsLayer::new(&bank, |charge: &Charge| {
//!     Some(Call::new("charge", &charge.arguments, "order 4711"))
//! });
//! let mut tool = ServiceBuilder::new()
//!     .layer(layer.classify(understood))
//!     // It charges, and the reply is lost.
//!     .service_fn(|_: Charge| async { Err::<(), _>(std::io::Error::from(std::io::ErrorKind::ConnectionReset)) });
//!
//! let task = Task::new("checkout");
//! let charge = Charge { arguments: r#"{"cents":1200}"#.into(), task };
//! assert!(tool.ready().await.unwrap().call(charge.clone()).await.unwrap_err().is::<std::io::Error>());
//! // The model tries again.
//! let again = Charge { arguments: r#"{ "cents": 1200.0 }"#.into(), ..charge };
//! let no = tool.ready().await.unwrap().call(again).await.unwrap_err();
//! assert!(Refusal::find(&*no).unwrap().why.contains("may have taken effect"));
//! # }
//! ```

pub mod future;
mod layer;
mod service;
pub mod state;

pub use future::ResponseFuture;
pub use layer::ToolCallsLayer;
pub use service::ToolCalls;
pub use state::Call;
