//! The two ways to call a ladder of providers.

use std::{future::Future, pin::Pin, sync::Arc};

use http_body_util::BodyExt;
use tower::{BoxError, ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailoverLayer, JitteredRetryLayer,
    Provider, ProviderSettings, RatioBudget, RetryAfterLayer, TaskLayer, failover::Rung,
};

use crate::{
    options::Target,
    wire::{Completion, Wire, aim},
};

/// Makes one completion, and says why if it could not.
pub type Call =
    Arc<dyn Fn(Completion) -> Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>> + Send + Sync>;

/// What everybody writes first: each rung in turn, three tries in all at each. Whatever is not a success
/// means "down, next".
pub fn naive(wire: Wire, targets: Vec<Target>) -> Call {
    Arc::new(move |request| {
        let (wire, targets) = (wire.clone(), targets.clone());
        Box::pin(async move {
            let mut last: BoxError = "no provider".into();
            for _try in 0..3 {
                for (rung, target) in targets.iter().enumerate() {
                    match wire.clone().oneshot(aim(request.clone(), rung, &target.url)).await {
                        Ok(reply) => match finish(reply).await {
                            Ok(()) => return Ok(()),
                            Err(e) => last = e,
                        },
                        Err(e) => last = e.into(),
                    }
                }
            }
            Err(last)
        })
    })
}

/// The stack of this project. Nothing is known about the providers but what their replies say, unless a
/// ceiling was given. The handles are for looking at, the layers share their state.
pub fn tower_herd(wire: Wire, targets: &[Target], seed: u64) -> Result<(Call, Vec<Provider>), BoxError> {
    let fleet = Fleet::local().seed(seed);
    let (mut providers, mut rungs) = (Vec::new(), Vec::new());
    for (at, target) in targets.iter().enumerate() {
        let mut settings = ProviderSettings::new();
        if let Some(ceiling) = target.ceiling {
            settings = settings.ceiling(ceiling);
        }
        let provider = fleet.configure(&format!("rung {}", at + 1), settings)?;
        let layers = ServiceBuilder::new()
            .layer(RetryAfterLayer::new(&provider))
            .layer(FleetLimitLayer::new(&provider))
            .layer(ClassifyLayer::new(&provider))
            .layer(AttemptTimeoutLayer::default())
            .into_inner();
        let url = target.url.clone();
        let tier = u32::try_from(at)?;
        rungs.push(Rung::new(&provider, layers).tier(tier).map(move |request| aim(request, at, &url)));
        providers.push(provider);
    }
    let budget = RatioBudget::default();
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(JitteredRetryLayer::new().budget(budget.clone()).seed(seed))
        .layer(HashedFailoverLayer::new(rungs)?.budget(&budget))
        .service(wire);
    let call: Call = Arc::new(move |request| {
        let service = service.clone();
        Box::pin(async move { finish(service.oneshot(request).await?).await })
    });
    Ok((call, providers))
}

/// Reads a reply to its end: only then is a completion there, and only then is the connection free again.
async fn finish<B>(reply: http::Response<B>) -> Result<(), BoxError>
where
    B: http_body::Body,
    B::Error: Into<BoxError>,
{
    let status = reply.status();
    reply.into_body().collect().await.map_err(Into::into)?;
    if status.is_success() { Ok(()) } else { Err(format!("answered {status}").into()) }
}
