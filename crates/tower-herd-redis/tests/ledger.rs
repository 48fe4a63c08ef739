//! The Lua function and the Rust ledger are one set of rules: driven with the same reports, at the same times of a
//! clock that the test moves, they give the same grants and wake the same holders.
//!
//! The shipped text runs on a private redis-server. Only `redis` is another for it: `TIME` is the test's, and
//! what it publishes is handed back.
#![cfg(feature = "servers")]

mod ledger_fleet;

use ledger_fleet::{Fleet, Loss, Shape};
use redis::Connection;
use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};
use tower_herd::store::{Grant, HolderId, Ledger, Report, Wakes};

const LEASE: &str = include_str!("../src/lease.lua");
const PEEK: &str = include_str!("../src/peek.lua");

/// `ARGV[5]`: the time, in milliseconds.
const PRELUDE: &str = "
local real, published = redis, ''
local redis = setmetatable({ call = function(command, ...)
    if command == 'TIME' then
        return { tostring(math.floor(ARGV[5] / 1000)), tostring(ARGV[5] % 1000 * 1000) }
    elseif command == 'publish' then
        published = select(2, ...)
        return 0
    end
    return real.call(command, ...)
end }, { __index = real })
local function step()
";
const POSTLUDE: &str = "
end
local answer = step()
return { answer, published }
";

/// A redis-server of our own, on a socket in a directory of its own.
struct Server {
    child: Child,
    directory: PathBuf,
}

impl Server {
    fn start(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("herd-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory");
        let child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(directory.join("s"))
            .arg("--pidfile")
            .arg(directory.join("redis.pid"))
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server (Debian: apt-get install redis-server)");
        Server { child, directory }
    }

    fn connect(&self) -> Connection {
        let url = format!("redis+unix://{}", self.directory.join("s").display());
        let client = redis::Client::open(url).expect("an address");
        for _ in 0..500 {
            if let Ok(connection) = client.get_connection() {
                return connection;
            }
            #[expect(clippy::disallowed_methods, reason = "a real server starts in real time")]
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("redis-server does not answer on {}", self.directory.display());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_dir_all(&self.directory).ok();
    }
}

/// The book on the server, under the test's clock.
struct Lua {
    connection: Connection,
    script: redis::Script,
}

const KEY: &str = "herd:v1:{test}";

impl Lua {
    fn new(server: &Server) -> Self {
        let script = redis::Script::new(&format!("{PRELUDE}{LEASE}{POSTLUDE}"));
        let mut lua = Lua { connection: server.connect(), script };
        lua.forget();
        lua
    }

    fn exchange(&mut self, clock: u64, run: &str, report: &Report) -> (Grant, Wakes) {
        let report = serde_json::to_string(report).expect("a report");
        let (grant, woken): (String, String) = self
            .script
            .key(KEY)
            .arg(report)
            .arg("channel")
            .arg(run)
            .arg("publish")
            .arg(clock)
            .invoke(&mut self.connection)
            .unwrap_or_else(|error| panic!("the script failed: {error}"));
        let grant = serde_json::from_str(&grant).unwrap_or_else(|error| panic!("{error}: {grant}"));
        let wakes = match woken.as_str() {
            "*" => Wakes::All,
            "" => Wakes::Holders(Vec::new()),
            ids => Wakes::Holders(ids.split(',').map(|id| id.parse::<HolderId>().expect("an id")).collect()),
        };
        (grant, wakes)
    }

    fn forget(&mut self) {
        redis::cmd("DEL").arg(KEY).exec(&mut self.connection).expect("DEL");
    }

    fn dump(&mut self) -> Option<Vec<u8>> {
        redis::cmd("DUMP").arg(KEY).query(&mut self.connection).expect("DUMP")
    }

    fn restore(&mut self, dump: &Option<Vec<u8>>) {
        self.forget();
        if let Some(dump) = dump {
            redis::cmd("RESTORE").arg(KEY).arg(0).arg(dump).exec(&mut self.connection).expect("RESTORE");
        }
    }
}

fn seeds(short: u64, long: u64) -> std::ops::Range<u64> {
    if let Some(seed) = std::env::var("TOWER_HERD_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return seed..seed + 1;
    }
    1..1 + if std::env::var_os("TOWER_HERD_LONG").is_some() { long } else { short }
}

fn compare(shape: &Shape, seeds: std::ops::Range<u64>) {
    let server = Server::start(shape.name);
    for seed in seeds {
        let mut lua = Lua::new(&server);
        let mut rust = Ledger::new(true);
        let mut fleet = Fleet::new(seed, shape);
        let mut last = Vec::new();
        let mut replica = (rust.clone(), lua.dump());
        for step in 0..shape.steps {
            let (clock, run, report) = fleet.next();
            if step % 10 == 0 {
                replica = (rust.clone(), lua.dump());
            }
            match fleet.take_loss() {
                Some(Loss::All) => {
                    lua.forget();
                    rust = Ledger::new(true);
                }
                Some(Loss::Latest) => {
                    rust = replica.0.clone();
                    lua.restore(&replica.1);
                }
                None => {}
            }
            let ours = rust.exchange(clock, &run, &report);
            let theirs = lua.exchange(clock, &run, &report);
            last.push(format!("{step}: {clock} {run} {report:?}"));
            assert_eq!(
                ours,
                theirs,
                "TOWER_HERD_SEED={seed}: left is Rust's and right is Lua's, after\n{}",
                last[last.len().saturating_sub(3)..].join("\n"),
            );
            fleet.hear(&report, ours.0, &ours.1);
        }
        let text: String = redis::Script::new(PEEK).key(KEY).invoke(&mut lua.connection).expect("peek");
        serde_json::from_str::<serde_json::Value>(&text).expect("peek's JSON");
    }
}

#[test]
fn a_small_fleet_with_faults() {
    compare(&ledger_fleet::SMALL, seeds(30, 3000));
}

#[test]
fn a_fleet_with_more_members_than_slots() {
    compare(&ledger_fleet::CROWDED, seeds(10, 500));
}

#[test]
fn a_fleet_too_large_to_look_at_all_each_time() {
    compare(&ledger_fleet::LARGE, seeds(3, 100));
}
