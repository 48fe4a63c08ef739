//! The store: a Redis of the reader's, or a private one that is stopped when this is dropped.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use redis::{AsyncConnectionConfig, Client};
use tokio::time::{Instant, sleep};

/// Where the processes meet.
pub enum Server {
    Own(OwnServer),
    Theirs(String),
}

impl Server {
    /// `own`, or a URL; it answers.
    pub async fn find(redis: &str) -> Result<Self, String> {
        if redis == "own" {
            return OwnServer::start().await.map(Server::Own);
        }
        ask(redis, "PING").await.map_err(|error| format!("the Redis of --redis does not answer: {error}"))?;
        Ok(Server::Theirs(redis.to_owned()))
    }

    pub fn url(&self) -> String {
        match self {
            Server::Own(own) => format!("redis://127.0.0.1:{}/", own.port),
            Server::Theirs(url) => url.clone(),
        }
    }
}

/// A redis-server from `PATH` that keeps nothing.
pub struct OwnServer {
    child: Option<Child>,
    folder: PathBuf,
    port: u16,
}

impl OwnServer {
    async fn start() -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("herd-fleet-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|e| format!("no folder for a redis-server ({e})"))?;
        let mut server = OwnServer { child: None, folder, port: 0 };
        // Somebody may take the port before its server does.
        for _ in 0..5 {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
            server.port = port.map_err(|e| format!("no free port ({e})"))?.port();
            if server.spawn().await? {
                return Ok(server);
            }
        }
        Err("redis-server does not start: does it run by itself?".into())
    }

    /// Starts it, empty. Whether it answers.
    async fn spawn(&mut self) -> Result<bool, String> {
        let mut command = Command::new("redis-server");
        command
            .args([
                "--port",
                &self.port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ])
            .args(["--daemonize", "no", "--pidfile"])
            .arg(self.folder.join("redis.pid"))
            .arg("--dir")
            .arg(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Ctrl-C is for this process alone, which then stops its server.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = command.spawn().map_err(|e| {
            format!("redis-server cannot be started from PATH ({e}): install it (Debian: redis-server), or give a --redis URL")
        })?;
        self.child = Some(child);
        let url = format!("redis://127.0.0.1:{}/", self.port);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(10) {
            if self.child.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None))) {
                break;
            }
            if ask(&url, "PING").await.is_ok() {
                return Ok(true);
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.stop();
        Ok(false)
    }

    /// Kills it and starts it again on the same port: whatever it knew is lost.
    pub async fn restart_empty(&mut self) -> Result<(), String> {
        self.stop();
        for _ in 0..5 {
            if self.spawn().await? {
                return Ok(());
            }
        }
        Err("redis-server does not start again".into())
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        self.stop();
        fs::remove_dir_all(&self.folder).ok();
    }
}

/// One command without arguments, on a connection of its own.
pub async fn ask(url: &str, command: &str) -> Result<(), String> {
    let wait = Duration::from_secs(3);
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(wait)).set_response_timeout(Some(wait));
    let answer = async {
        let mut connection = Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await?;
        redis::cmd(command).query_async::<redis::Value>(&mut connection).await
    };
    answer.await.map(drop).map_err(|error| error.to_string())
}
