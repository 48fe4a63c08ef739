//! The breaker of job queues over a real database: three agents that share nothing else.
#![cfg(feature = "servers")]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use support::{Db, pool};
use tokio::time::sleep;
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    BoxError, Refusal,
    retry_token::{JobBreakerLayer, JobBreakerSettings, Tokens, WaitCause},
};
use tower_herd_postgres::PostgresTokens;

const MS: Duration = Duration::from_millis(1);

#[derive(Default)]
struct Dependency {
    up: AtomicBool,
    calls: AtomicU32,
    alerts: AtomicU32,
    refused: AtomicU32,
}

/// An agent of its own: another pool, other tokens, another layer.
async fn agent(
    db: &Db,
    dependency: &Arc<Dependency>,
) -> impl Service<&'static str, Response = (), Error = BoxError> + Clone + use<> {
    let store = PostgresTokens::in_schema(pool(db.options.clone(), 4).await, &db.schema).unwrap();
    let settings = JobBreakerSettings::new().failures(5).open(1500 * MS).jitter(0.0);
    let name: fn(&&'static str) -> Option<&'static str> = |job| Some(job);
    let alerts = dependency.clone();
    let layer =
        JobBreakerLayer::with(&Tokens::new("jobs", store), name, settings).unwrap().on_alert(move |_| {
            alerts.alerts.fetch_add(1, SeqCst);
        });
    let dependency = dependency.clone();
    ServiceBuilder::new().layer(layer).service(service_fn(move |_: &'static str| {
        let dependency = dependency.clone();
        async move {
            dependency.calls.fetch_add(1, SeqCst);
            if dependency.up.load(SeqCst) {
                // The probe goes on until all others have been refused: three before it, eight beside it.
                while dependency.refused.load(SeqCst) < 11 {
                    sleep(5 * MS).await;
                }
                return Ok(());
            }
            Err::<_, BoxError>("down".into())
        }
    }))
}

/// Whether the job ran; what refuses it otherwise is the breaker.
async fn ran(
    agent: &(impl Service<&'static str, Response = (), Error = BoxError> + Clone),
    dependency: &Dependency,
) -> bool {
    match agent.clone().oneshot("crm").await {
        Ok(()) => true,
        Err(error) => match Refusal::find(&*error) {
            Some(refusal) => {
                assert_eq!(refusal.not_before().unwrap().cause, WaitCause::Breaker);
                dependency.refused.fetch_add(1, SeqCst);
                false
            }
            None => true,
        },
    }
}

/// Five failures in a row, whoever saw them, open it for all; one probe, whoever sends it, closes it for all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_breaker_for_three_agents() {
    let db = Db::new("breaker").await;
    let dependency = Arc::new(Dependency::default());
    let agents =
        [agent(&db, &dependency).await, agent(&db, &dependency).await, agent(&db, &dependency).await];
    for failure in 0..5 {
        assert!(ran(&agents[failure % 3], &dependency).await);
    }
    for agent in &agents {
        assert!(!ran(agent, &dependency).await, "an agent that saw one or two of the five is kept back too");
    }
    assert_eq!((dependency.calls.load(SeqCst), dependency.alerts.load(SeqCst)), (5, 1));

    dependency.up.store(true, SeqCst);
    sleep(1600 * MS).await;
    let nine = (0..9).map(|n| ran(&agents[n % 3], &dependency));
    let probes = futures_util::future::join_all(nine).await.into_iter().filter(|ran| *ran).count();
    assert_eq!(probes, 1);
    assert_eq!(dependency.calls.load(SeqCst), 6);
    for agent in &agents {
        assert!(ran(agent, &dependency).await);
    }
    assert_eq!(dependency.alerts.load(SeqCst), 1);
}
