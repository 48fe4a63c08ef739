//! A server that is killed, and one that does not answer. Both are this test's own.
#![cfg(feature = "servers")]

mod support;

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use support::Server;
use tokio::time::{sleep, timeout};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    BoxError, Refusal,
    retry_token::{
        Claim, OnOutage, RetryTokenLayer, RetryTokens, Schedule, TokenSettings, Tokens, WaitCause,
    },
};
use tower_herd_postgres::{Error, PostgresTokens};

const MS: Duration = Duration::from_millis(1);

fn minute() -> Schedule {
    let minute = Duration::from_secs(60);
    Schedule::new().growth(minute, 1.0, minute).unwrap()
}

async fn until_it_answers(tokens: &PostgresTokens) {
    while !matches!(timeout(250 * MS, tokens.peek("any")).await, Ok(Ok(_))) {
        sleep(20 * MS).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_of_the_server_the_tokens_are_there_and_the_pool_works() {
    let mut server = Server::start();
    let tokens = PostgresTokens::connect_lazy(&server.url()).unwrap();
    tokens.migrate().await.unwrap();
    let Claim::Granted(grant) = tokens.claim("key", &minute()).await.unwrap() else { panic!("not granted") };

    server.kill();
    for _ in 0..3 {
        let error = tokens.claim("key", &minute()).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)) && error.is_transient(), "{error:?}");
    }
    server.again();
    // By the same pool, whose connections all led to the dead one.
    until_it_answers(&tokens).await;
    assert!(matches!(tokens.claim("key", &minute()).await.unwrap(), Claim::NotBefore(_)));
    assert!(tokens.clear("key", grant.holder).await.unwrap());
}

/// Nothing breaks, and nobody answers. Callers give up by themselves, as the layer does after its store timeout;
/// each leaves a connection on which an answer may never come. None of them is used again, so the pool is whole as
/// soon as somebody answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_server_that_did_not_answer_the_pool_works() {
    let server = Server::start();
    let tokens = PostgresTokens::connect_lazy(&server.url()).unwrap();
    tokens.migrate().await.unwrap();
    let Claim::Granted(grant) = tokens.claim("key", &minute()).await.unwrap() else { panic!("not granted") };

    server.freeze();
    let late = (0..20).map(|n| {
        let tokens = tokens.clone();
        async move { timeout(250 * MS, tokens.claim(&format!("late {n}"), &minute())).await }
    });
    for answer in futures_util::future::join_all(late).await {
        assert!(answer.is_err(), "a frozen server has answered: {answer:?}");
    }
    server.thaw();
    until_it_answers(&tokens).await;
    assert!(tokens.clear("key", grant.holder).await.unwrap());
    for n in 0..20 {
        // Granted to nobody, or to somebody who is gone: at most once.
        let answer = tokens.claim(&format!("late {n}"), &minute()).await.unwrap();
        if let Claim::Granted(grant) = answer {
            assert_eq!(grant.streak, 1);
        }
    }
}

/// What a standby, or the old primary after a failover, says: that connection is not used again.
#[tokio::test]
async fn a_connection_to_a_standby_is_left() {
    let server = Server::start();
    let tokens = PostgresTokens::connect_lazy(&server.url()).unwrap();
    tokens.migrate().await.unwrap();
    sqlx::raw_sql("ALTER DATABASE postgres SET default_transaction_read_only = on")
        .execute(tokens.pool())
        .await
        .unwrap();
    // The connections that are there know nothing of it; new ones do, and are left again.
    let spoiled = PostgresTokens::connect_lazy(&server.url()).unwrap();
    let error = spoiled.claim("key", &minute()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
    sqlx::raw_sql("ALTER DATABASE postgres SET default_transaction_read_only = off")
        .execute(tokens.pool())
        .await
        .unwrap();
    assert!(matches!(spoiled.claim("key", &minute()).await.unwrap(), Claim::Granted(_)));
}

// ------------------------------------------------------------------------------------- what the layer does then

#[derive(Clone, Copy, Debug)]
struct Job {
    key: &'static str,
    attempt: u32,
}

/// A worker whose jobs fail, so that their tokens stay.
fn worker(tokens: &Tokens<PostgresTokens>) -> impl Service<Job, Response = (), Error = BoxError> + Clone {
    let key: fn(&Job) -> Option<&'static str> = |job| Some(job.key);
    let attempt: fn(&Job) -> u32 = |job| job.attempt;
    ServiceBuilder::new()
        .layer(RetryTokenLayer::new(tokens, key, attempt).schedule(minute()))
        .service(service_fn(|_: Job| async { Err::<(), _>("it failed") }))
}

/// What stood in the way, or None if the job ran.
async fn refused(
    worker: &(impl Service<Job, Response = (), Error = BoxError> + Clone),
    job: Job,
) -> Option<WaitCause> {
    let error = worker.clone().oneshot(job).await.unwrap_err();
    let refusal = Refusal::find(&*error)?;
    assert!(refusal.wait().is_some_and(|wait| !wait.is_zero()), "{job:?}: {refusal:?}");
    Some(refusal.not_before().unwrap().cause)
}

/// The server dies, and comes back. First attempts run whatever the policy; retries by the policy; one alert an
/// outage; and the tokens from before hold afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_policy_while_the_server_is_dead() {
    let mut server = Server::start();
    for policy in [OnOutage::Local, OnOutage::Open, OnOutage::Closed] {
        let store = PostgresTokens::connect_lazy(&server.url()).unwrap();
        store.migrate().await.unwrap();
        let alerts = Arc::new(AtomicU32::new(0));
        let settings = TokenSettings::new().on_outage(policy).asks(100 * MS, 200 * MS);
        let heard = alerts.clone();
        let tokens = Tokens::with("jobs", store, settings).unwrap().on_alert(move |_| {
            heard.fetch_add(1, SeqCst);
        });
        let worker = worker(&tokens);
        let key = policy.as_str();
        assert_eq!(refused(&worker, Job { key, attempt: 1 }).await, None);
        assert_eq!(refused(&worker, Job { key, attempt: 2 }).await, Some(WaitCause::Token));

        server.kill();
        for _ in 0..3 {
            let seen = refused(&worker, Job { key, attempt: 2 }).await;
            let expected = match policy {
                // Its process has seen the grant.
                OnOutage::Local => Some(WaitCause::Token),
                OnOutage::Open => None,
                _ => Some(WaitCause::StoreDown),
            };
            assert_eq!(seen, expected, "{policy:?}");
            assert_eq!(refused(&worker, Job { key: "first", attempt: 1 }).await, None, "{policy:?}");
        }
        assert_eq!(alerts.load(SeqCst), 1, "{policy:?}");

        server.again();
        while tokens.is_down() {
            refused(&worker, Job { key, attempt: 2 }).await;
            sleep(20 * MS).await;
        }
        assert_eq!(refused(&worker, Job { key, attempt: 2 }).await, Some(WaitCause::Token), "{policy:?}");
        assert_eq!(alerts.load(SeqCst), 1, "{policy:?}");
        let token = tokens.store().peek(key).await.unwrap().unwrap();
        assert_eq!(token.streak, 1, "{policy:?}: refusals count nothing");
    }
}

/// Dies between the run and its clear: the job was done, its token stays, and the next run of its key is late, not
/// lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_dies_before_the_clear_costs_a_wait() {
    let server = Arc::new(tokio::sync::Mutex::new(Server::start()));
    let store = PostgresTokens::connect_lazy(&server.lock().await.url()).unwrap();
    store.migrate().await.unwrap();
    let tokens = Tokens::new("jobs", store.clone());
    let key: fn(&Job) -> Option<&'static str> = |job| Some(job.key);
    let attempt: fn(&Job) -> u32 = |job| job.attempt;
    let dying = server.clone();
    let worker = ServiceBuilder::new()
        .layer(RetryTokenLayer::new(&tokens, key, attempt).schedule(minute()))
        .service(service_fn(move |_: Job| {
            let server = dying.clone();
            async move {
                server.lock().await.kill();
                Ok::<_, Infallible>(())
            }
        }));
    worker.oneshot(Job { key: "key", attempt: 1 }).await.unwrap();
    server.lock().await.again();
    until_it_answers(&store).await;
    let token = store.peek("key").await.unwrap().unwrap();
    assert_eq!(token.streak, 1);
    assert!(!token.wait.is_zero());
}
