//! Policies: how a fleet calls a ladder of providers.
//!
//! A [`Policy`] is given the [`World`] (settings, providers, seed) and hands back one [`Client`] for
//! each simulated process. A client takes a request and the task it belongs to, and answers with the
//! last real reply or an error; the simulator calls a task done when that reply is a 2xx whose body
//! ends well, and lost otherwise. The judge listens at the providers, so a policy cannot flatter
//! itself; only what no provider can know (alerts, trips) it tells to the world's [`Log`](crate::scenario::Log).
//!
//! Where stacks are stacked (`stacks=3`), the simulator asks the policy for clients once a stack, from the
//! inside out; what [`World::rungs`] gives is then the stack below, as a server would show it.
//!
//! To add a policy, implement the trait and put it into [`Registry`]:
//!
//! ```
//! use http_body_util::BodyExt;
//! use tower::{Service, ServiceExt};
//! use tower_herd_sim::policy::{self, Client, Policy, Registry, World};
//!
//! /// Calls the first rung once and hopes.
//! struct Hope;
//!
//! impl Policy for Hope {
//!     fn name(&self) -> &'static str {
//!         "hope"
//!     }
//!
//!     fn clients(&self, world: &World) -> Result<Vec<Client>, tower_herd_sim::BoxError> {
//!         Ok(world.processes().map(|process| Client::from_service(world.rungs(process).remove(0))).collect())
//!     }
//! }
//!
//! let mut registry = Registry::standard();
//! registry.add(Hope);
//! assert!(registry.get("hope").is_ok());
//! ```

mod chain;
mod consecutive;
mod herd;
mod hop;
mod oracle;
#[cfg(feature = "peers")]
mod peers;
mod world;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_service::Service;

pub use chain::{Chain, Wait};
pub use consecutive::Consecutive;
pub use herd::{NoBreaker, StrictBreaker, ThrottleOnly, TowerHerd};
pub use hop::Upstream;
pub use oracle::Oracle;
#[cfg(feature = "peers")]
pub use peers::{ReqwestRetry, TowerResilience};
pub use world::{Router, World};

use crate::BoxError;
use crate::scenario::Settings;

/// The request every client gets: a JSON POST, declared costly by the header `x-safety`.
pub type SimRequest = Request<Full<Bytes>>;
/// The reply of a client, whatever body its stack made of it.
pub type SimResponse = Response<UnsyncBoxBody<Bytes, BoxError>>;
/// The future of a client.
pub type SimFuture = Pin<Box<dyn Future<Output = Result<SimResponse, BoxError>> + Send>>;

/// The task a request belongs to; also in the request's extensions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TaskInfo {
    /// Its number, from 0.
    pub id: u64,
    /// The agent that owns it.
    pub agent: u32,
    /// The process in which the agent lives.
    pub process: u32,
    /// When it must be over.
    pub deadline: Instant,
    /// What a call costs, in tokens.
    pub cost: f64,
}

/// How one process calls the ladder. Cheap to clone.
#[derive(Clone)]
pub struct Client(Arc<dyn Fn(SimRequest, TaskInfo) -> SimFuture + Send + Sync>);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// From an async closure.
    pub fn new<F, Fut>(call: F) -> Self
    where
        F: Fn(SimRequest, TaskInfo) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<SimResponse, BoxError>> + Send + 'static,
    {
        Self(Arc::new(move |request, task| Box::pin(call(request, task))))
    }

    /// From a tower service: each request is sent through a clone of it.
    pub fn from_service<S, B>(service: S) -> Self
    where
        S: Service<SimRequest, Response = Response<B>> + Clone + Send + Sync + 'static,
        S::Error: Into<BoxError>,
        S::Future: Send,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self::new(move |request, _| {
            let service = service.clone();
            async move { service.oneshot(request).await.map(erase).map_err(Into::into) }
        })
    }

    /// Sends the request of a task.
    pub fn call(&self, request: SimRequest, task: TaskInfo) -> SimFuture {
        (self.0)(request, task)
    }
}

/// Boxes the body of a reply, so that all clients answer with one type.
pub fn erase<B>(response: Response<B>) -> SimResponse
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    response.map(|body| body.map_err(Into::into).boxed_unsync())
}

/// A way to call a ladder of providers.
pub trait Policy: Send + Sync {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Its configuration, if that is worth printing beside the figures.
    fn describe(&self, settings: &Settings) -> Option<String> {
        let _ = settings;
        None
    }

    /// Whether it reads the machine's clock and so has to run in real time with these settings.
    fn real_time(&self, settings: &Settings) -> bool {
        let _ = settings;
        false
    }

    /// Whether it belongs into the table of these settings; asked for by name it runs anyway.
    fn plays(&self, settings: &Settings) -> bool {
        let _ = settings;
        true
    }

    /// One client for each process of the world, in order. Called inside the runtime, at the start.
    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError>;
}

/// No policy of that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPolicy {
    name: String,
    known: Vec<&'static str>,
}

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown policy `{}`; there are: {}", self.name, self.known.join(", "))
    }
}

impl std::error::Error for UnknownPolicy {}

/// The policies that can be run by name, in the order in which tables show them.
#[derive(Clone, Default)]
pub struct Registry(Vec<Arc<dyn Policy>>);

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl Registry {
    /// The policies of this crate: the chains, the breaker of five in a row, peers if the feature
    /// is on, this project's stack, and the oracle.
    pub fn standard() -> Self {
        let mut all = Self::default();
        all.add(Chain::naive());
        all.add(Chain::backoff());
        all.add(Chain::jitter());
        #[cfg(feature = "peers")]
        {
            all.add(ReqwestRetry);
            all.add(TowerResilience);
        }
        all.add(Consecutive);
        all.add(ThrottleOnly);
        all.add(StrictBreaker);
        all.add(NoBreaker);
        all.add(TowerHerd);
        all.add(Oracle);
        all
    }

    /// Adds a policy before the oracle (which closes each table), replacing one of the same name.
    pub fn add(&mut self, policy: impl Policy + 'static) {
        self.0.retain(|p| p.name() != policy.name());
        let at =
            if self.0.last().is_some_and(|p| p.name() == "oracle") { self.0.len() - 1 } else { self.0.len() };
        self.0.insert(at, Arc::new(policy));
    }

    /// All names.
    pub fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|p| p.name()).collect()
    }

    /// All policies.
    pub fn all(&self) -> &[Arc<dyn Policy>] {
        &self.0
    }

    /// One policy.
    pub fn get(&self, name: &str) -> Result<Arc<dyn Policy>, UnknownPolicy> {
        let found = self.0.iter().find(|p| p.name() == name).cloned();
        found.ok_or_else(|| UnknownPolicy { name: name.into(), known: self.names() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_closes_the_table_and_names_are_unique() {
        let mut r = Registry::standard();
        let before = r.names().len();
        r.add(Chain::naive());
        assert_eq!(r.names().len(), before);
        assert_eq!(r.names().last(), Some(&"oracle"));
    }

    #[test]
    fn an_unknown_policy_lists_the_known_ones() {
        let error = Registry::standard().get("magic").err().unwrap().to_string();
        assert!(error.contains("magic") && error.contains("naive"), "{error}");
    }
}
