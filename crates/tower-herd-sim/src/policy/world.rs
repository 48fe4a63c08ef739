//! What a policy is given.

use std::task::{Context, Poll};

use futures_util::future::Either;
use http::{Request, Response};
use std::future::{Ready, ready};
use tower_service::Service;

use super::Client;
use super::hop::Upstream;
use crate::BoxError;
use crate::provider::{ProviderFuture, ProviderService, Quota, ScriptedBody, ScriptedProvider};
use crate::scenario::{Log, Settings};
use crate::store::ScriptedStore;

/// The providers of one run and what may be known about them.
#[derive(Clone, Debug)]
pub struct World {
    /// The settings of the run. What is not `configured` is not for a policy to read.
    pub settings: Settings,
    /// One provider a rung, cheapest first, each its own tier.
    pub providers: Vec<ScriptedProvider>,
    /// The seed of the run, another one for each of several stacks.
    pub seed: u64,
    /// Where a policy tells what cannot be counted at the providers.
    pub log: Log,
    /// Where the processes meet, if they do.
    pub store: Option<ScriptedStore>,
    /// The stack below this one, a client for each process.
    below: Vec<Client>,
}

impl World {
    /// Starts the providers: inside the runtime that will call them.
    pub fn new(settings: Settings, seed: u64) -> Self {
        let providers = settings.scripts(seed).into_iter().map(ScriptedProvider::new).collect();
        let store = settings.store_script(seed).map(ScriptedStore::new);
        Self { settings, providers, seed, log: Log::new(), store, below: Vec::new() }
    }

    /// The world as a stack sees it that calls another one, of these clients, in place of the providers.
    pub(crate) fn above(&self, level: u32, below: Vec<Client>) -> Self {
        let seed = self.seed.wrapping_add(u64::from(level).wrapping_mul(0xD134_2543_DE82_EF95));
        Self { seed, below, ..self.clone() }
    }

    /// The numbers of the processes.
    pub fn processes(&self) -> std::ops::Range<u32> {
        0..self.settings.processes
    }

    /// Whether what is called is another stack.
    pub fn is_above(&self) -> bool {
        !self.below.is_empty()
    }

    /// What one process may call: a client of each rung; or, where stacks are stacked, the one below.
    pub fn rungs(&self, process: u32) -> Vec<Upstream> {
        match self.below.get(process as usize) {
            Some(client) => vec![Upstream::stack(client.clone(), &self.settings)],
            None => self.providers.iter().map(|p| Upstream::provider(p.service_for(process))).collect(),
        }
    }

    /// One client that picks the rung by the host of the URL: `http://rung-1/` is the cheapest.
    pub fn router(&self, process: u32) -> Router {
        Router { rungs: self.providers.iter().map(|p| p.service_for(process)).collect() }
    }

    /// The quotas as published, if the settings say that policies know them.
    pub fn published(&self) -> Option<Vec<Quota>> {
        let quotas = self.settings.ceilings.iter().map(|c| self.settings.quota(*c));
        self.settings.configured.then(|| quotas.collect())
    }
}

/// One service over all rungs, as an HTTP client is one service over all hosts.
#[derive(Clone, Debug)]
pub struct Router {
    rungs: Vec<ProviderService>,
}

impl<B> Service<Request<B>> for Router {
    type Response = Response<ScriptedBody>;
    type Error = BoxError;
    type Future = futures_util::future::ErrInto<
        Either<
            futures_util::future::ErrInto<ProviderFuture, BoxError>,
            Ready<Result<Response<ScriptedBody>, BoxError>>,
        >,
        BoxError,
    >;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        use futures_util::TryFutureExt;
        let host = request.uri().host().unwrap_or_default();
        let rung = host.strip_prefix("rung-").and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
        let found = rung.checked_sub(1).and_then(|i| self.rungs.get_mut(i));
        match found {
            Some(service) => Either::Left(service.call(request).err_into()).err_into(),
            None => {
                let error: BoxError =
                    format!("no provider at host `{host}`; hosts are rung-1, rung-2, ...").into();
                Either::Right(ready(Err(error))).err_into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;
    use tower::ServiceExt;

    #[tokio::test(start_paused = true)]
    async fn the_router_goes_by_host() {
        let world = World::new(Settings::new(Scenario::Stampede), 1);
        let get = |uri: &str| Request::get(uri).body(()).unwrap();
        world.router(0).oneshot(get("http://rung-2/x")).await.unwrap();
        assert_eq!(world.providers[1].stats().wire_calls, 1);
        let error = world.router(0).oneshot(get("http://nowhere/")).await.err().unwrap();
        assert!(error.to_string().contains("nowhere"));
    }
}
