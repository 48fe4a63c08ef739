//! A server that is killed, and one that does not answer. Both are this test's own.
#![cfg(feature = "servers")]

mod support;

use std::time::Duration;
use support::Server;
use tokio::time::{sleep, timeout};
use tower_herd::retry_token::{Claim, RetryTokens, Schedule};
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

/// Nothing breaks, and nobody answers. Callers give up by themselves, as the layer does after its store timeout; each
/// leaves a connection on which an answer may never come. None of them is used again, so the pool is whole as soon as somebody
/// answers.
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
