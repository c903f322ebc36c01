//! The retry after a lost race, for operations that read a log and then write to it.

use crate::error::{Error, Result};
use crate::model::LogId;

/// Maximum number of lost races of one operation. For each lost race, another writer succeeded.
const MAX_LOST_RACES: u32 = 20;

/// Runs an operation that reads a log and then writes to it. `attempt` returns none if another
/// writer was first; it then runs again and reads the entries of that writer.
pub async fn retry<T, F: Future<Output = Result<Option<T>>>>(
    id: &LogId,
    mut attempt: impl FnMut() -> F,
) -> Result<T> {
    let mut races = LostRaces::default();
    loop {
        // On the heap: an attempt contains a whole restore, which would not fit on the stack twice.
        if let Some(value) = Box::pin(attempt()).await? {
            return Ok(value);
        }
        races.count(id)?;
    }
}

/// Counts the lost races of one operation, for operations that also retry for other reasons.
#[derive(Debug, Default)]
pub struct LostRaces(u32);

impl LostRaces {
    /// Counts a lost race; an error if there were too many.
    pub fn count(&mut self, id: &LogId) -> Result<()> {
        self.0 += 1;
        if self.0 < MAX_LOST_RACES {
            return Ok(());
        }
        Err(
            Error::unavailable(format!("another writer keeps changing {id}"))
                .hint("stop the other writer, then run the command again"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn a_limited_number_of_races_may_be_lost() {
        let id = LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: "s".parse().unwrap(),
        };
        for lost in [0, 1, MAX_LOST_RACES - 1, MAX_LOST_RACES] {
            let mut attempts = 0;
            let outcome = retry(&id, || {
                attempts += 1;
                std::future::ready(Ok((attempts > lost).then_some(attempts)))
            })
            .await;
            if lost < MAX_LOST_RACES {
                assert_eq!(outcome.unwrap(), lost + 1);
            } else {
                assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable);
                assert_eq!(attempts, MAX_LOST_RACES);
            }
        }
    }
}
