//! The fence table in SQL.

use async_trait::async_trait;

use super::SqlIndex;
use super::rows::{self, log_columns, to_bigint};
use crate::error::Result;
use crate::index::{FenceRow, FenceTable};
use crate::model::LogId;

#[async_trait]
impl FenceTable for SqlIndex {
    async fn read_fence(&self, log: &LogId) -> Result<Option<FenceRow>> {
        const SQL: &str =
            "SELECT seq, writer FROM fences WHERE namespace = $1 AND agent = $2 AND session = $3";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let found = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .fetch_optional(&mut *self.acquire().await?)
                .await?;
            found.as_ref().map(rows::read_fence).transpose()
        })
        .await
    }

    async fn compare_and_swap_fence(
        &self,
        log: &LogId,
        expected: Option<&FenceRow>,
        new: &FenceRow,
    ) -> Result<bool> {
        const INSERT: &str = "INSERT INTO fences (namespace, agent, session, seq, writer) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (namespace, agent, session) DO NOTHING";
        const UPDATE: &str = "UPDATE fences SET seq = $4, writer = $5 \
             WHERE namespace = $1 AND agent = $2 AND session = $3 AND seq = $6 AND writer = $7";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let seq = to_bigint("sequence number", new.seq)?;
            let mut query = sqlx::query(if expected.is_some() { UPDATE } else { INSERT });
            query = query
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .bind(seq)
                .bind(new.writer.as_str());
            if let Some(expected) = expected {
                query = query
                    .bind(to_bigint("sequence number", expected.seq)?)
                    .bind(expected.writer.as_str());
            }
            Ok(query
                .execute(&mut *self.acquire().await?)
                .await?
                .rows_affected()
                == 1)
        })
        .await
    }
}
